"""convert_sync_batchnorm."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from ..functional._collectives import WORLD, check_group
from ..modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, LinearBatchNorm1d, SyncBatchNorm
from ..modules._fusible import NORMS
from ._classes import Fusing
from ._modules import become_ours, names_of, ours_of, refuse_wrapped, why_left_alone

M = TypeVar("M", bound=nn.Module)


def convert_sync_batchnorm(module: M, process_group: Any = None) -> M:
    """Makes a model's BatchNorm1d, 2d, 3d and SyncBatchNorm, torch's and ours, `SyncBatchNorm` of
    ours, in place, and returns it; so it does those in a LinearBatchNorm1d, which stays fused.
    timm's BatchNormAct2d becomes ours with a process_group.

    All modules stay the same objects with the same parameters, buffers, flags and state dict;
    activations and fusions stay. To convert twice changes nothing more. `revert` gives
    torch.nn.SyncBatchNorm and timm's SyncBatchNormAct. Convert before DistributedDataParallel wraps
    the model, on the CPU as well.

    Left alone are InstanceNorm, modules that are hooked, parametrised, pruned, lazy, patched or
    TorchScript, unknown subclasses, and what convert's filter_fn refused:
    `cutlass_bn.explain(model)` says so, and of the others that they are synchronised.

    Args:
        module: any module, of any dtype and on any device; also a BatchNorm itself.
        process_group: as SyncBatchNorm's. None: the group that a module has already, else the
            world.

    Returns:
        module.

    Raises:
        TypeError: process_group is no group; a model that is wrapped already, as in `convert`.
    """
    refuse_wrapped(module, "convert")
    check_group(process_group)
    names = names_of(module)
    norms: list[Any] = [m.bn if isinstance(m, LinearBatchNorm1d) else m for m in names]
    for norm in norms:
        # Also where it has several names: all calls of it are synchronised.
        cls = _class_of(type(norm))
        if cls not in NORMS or why_left_alone(norm, [""]) is not None:
            continue
        if type(norm) is not cls:
            become_ours(norm, cls)
        if process_group is not None or not norm.is_synchronised:
            norm.process_group = WORLD if process_group is None else process_group
    for container in names:
        if isinstance(container, Fusing):
            container._make_fusing_plan()
    return module


def _class_of(cls: type) -> type:
    """Of a module of this class, once it is synchronised."""
    ours = ours_of(cls) or cls
    return SyncBatchNorm if ours in (BatchNorm1d, BatchNorm2d, BatchNorm3d) else ours


def _of_class(cls: type, module: M, process_group: Any = None) -> M:
    return convert_sync_batchnorm(module, process_group)


_of_class.__doc__ = convert_sync_batchnorm.__doc__
SyncBatchNorm.convert_sync_batchnorm = classmethod(_of_class)  # type: ignore[assignment]
