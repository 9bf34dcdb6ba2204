"""convert and revert."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from ..modules._fusible import LEFT_ALONE
from ._block import FusingBlock, plans_of
from ._classes import PLAN, Fusing, base_of, fusing_class, is_fusing, why_no_class
from ._modules import (
    Filter,
    become_ours,
    become_theirs,
    is_asked_for,
    names_of,
    ours_of,
    refuse_wrapped,
    theirs_of,
    why_left_alone,
)
from ._sequential import FusingSequential, groups, is_exact
from ._trace import NotTraceable

M = TypeVar("M", bound=nn.Module)


def convert(model: M, filter_fn: Filter | None = None, trace: bool = False) -> M:
    """Makes a model of torch's modules run on our kernels, in place, and returns it.

    BatchNorm1d, 2d and 3d, SyncBatchNorm and timm's BatchNormAct2d become ours. In an nn.Sequential
    or a class that inherits its forward neighbours run in one: BatchNorm and activation; Linear,
    BatchNorm1d and activation. All modules stay the same objects under the same names, with the
    same parameters, buffers, flags and state dict; only classes change. A child that is called by
    itself computes what it did, and what is hooked or replaced later is called as it is.

    Left alone are modules that are hooked, shared, parametrised, pruned, lazy, patched or
    TorchScript, InstanceNorm and unknown subclasses. `cutlass_bn.explain(model)`
    says of each module what became of it. To convert twice changes nothing more.

    Args:
        model: any module, of any dtype and on any device; also a BatchNorm itself.
        filter_fn: called with each BatchNorm, Linear and activation and with its qualified name;
            False leaves the module alone.
        trace: also fuse in the forwards of other containers, where torch.fx can trace them:
            BatchNorm, then an activation, an addition or both, as in the blocks of ResNets. Not
            while other threads run models: torch.fx patches nn.Module meanwhile.

    Returns:
        model.

    Raises:
        TypeError: a model that is wrapped already (DistributedDataParallel, DataParallel, FSDP,
            torch.compile), or has such a one in it.
    """
    refuse_wrapped(model, "convert")
    names = names_of(model)
    for module, its_names in names.items():
        if is_asked_for(module):
            module.__dict__.pop(LEFT_ALONE, None)
            if filter_fn is not None and not all(filter_fn(module, name) for name in its_names):
                module.__dict__[LEFT_ALONE] = True
        ours = ours_of(type(module))
        if ours is not None and why_left_alone(module, its_names) is None:
            become_ours(module, ours)
    for module in names:
        if isinstance(module, Fusing):
            module._make_fusing_plan()
        elif why_no_class(base_of(module)) is None:
            if is_exact(module):
                if groups(module):
                    _become(module, fusing_class(FusingSequential, base_of(module)))
            elif trace:
                _fuse_block(module)
    return model


def revert(model: M) -> M:
    """Takes back what `convert` did, in place, and returns the model.

    All modules get the classes of torch and timm, and keep all that has changed since. So do our
    modules that the model was built with; not those with an activation, which torch's don't have.

    Args:
        model: any module, converted or not.

    Returns:
        model.

    Raises:
        TypeError: as convert.
    """
    refuse_wrapped(model, "revert")
    for module in names_of(model):
        module.__dict__.pop(LEFT_ALONE, None)
        if is_fusing(module):
            module.__dict__.pop(PLAN, None)
            _become(module, base_of(module))
        theirs = theirs_of(module)
        if theirs is not None and getattr(module, "activation", None) is None:
            become_theirs(module, theirs)
    return model


def _become(module: Any, cls: type) -> None:
    module.__class__ = cls


def _fuse_block(module: nn.Module) -> None:
    try:
        plans = plans_of(module)
    except NotTraceable:
        return
    if any(plan.fusions for plan in plans.values()):
        _become(module, fusing_class(FusingBlock, base_of(module)))
        module.__dict__[PLAN] = plans
