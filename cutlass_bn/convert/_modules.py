"""The modules of a model that conversion is about, and why one is left alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ..functional._collectives import torchs_group
from ..modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, LinearBatchNorm1d, SyncBatchNorm
from ..modules._fusible import ACTIVATION_OF, LEFT_ALONE, NORMS, is_fusible, is_patched

_OURS: dict[type, type] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_WRAPPER_NAMES = ("OptimizedModule", "FullyShardedDataParallel")  # slow to import


def ours_of(cls: type) -> type | None:
    """Our class in the place of torch's or timm's, or None."""
    norm_act: Any = sys.modules.get("timm.layers.norm_act")
    if norm_act is not None and cls is norm_act.BatchNormAct2d:
        from ..modules.batch_norm_act import BatchNormAct2d

        return BatchNormAct2d
    return _OURS.get(cls)


def theirs_of(module: Any) -> type | None:
    """The class that a module's is in the place of, or None."""
    cls = type(module)
    if cls in NORMS and cls is not SyncBatchNorm and module.is_synchronised:
        synchronised: type = sys.modules["timm.layers.norm_act"].SyncBatchNormAct
        return synchronised
    return cls.__mro__[1] if cls in NORMS and cls not in _OURS.values() else _THEIRS.get(cls)


_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


def walk(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A model's modules under each of their names. Not those in a LinearBatchNorm1d, which is fused
    already, nor those in TorchScript."""
    yield name, module
    if isinstance(module, (LinearBatchNorm1d, torch.jit.ScriptModule)):
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from walk(child, f"{name}.{key}" if name else key)


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Each module of a model once, with all its names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in walk(model):
        names.setdefault(module, []).append(name)
    return names


def is_asked_for(module: nn.Module) -> bool:
    """Whether it is a norm, a Linear or an activation: what filter_fn decides about."""
    if isinstance(module, LinearBatchNorm1d):
        return False
    return isinstance(module, (_NormBase, nn.Linear)) or type(module) in _activations()


def _activations() -> set[type]:
    from torch.nn.modules import activation

    others = {cls for cls in vars(activation).values() if isinstance(cls, type)}
    return {*ACTIVATION_OF, *others} - {nn.Module, nn.MultiheadAttention}


def refuse_wrapped(model: nn.Module, verb: str) -> None:
    """TypeError for a model that is, or has in it, what runs another: its copies would go on."""
    for name, module in walk(model):
        cls = type(module)
        compiled = module.__dict__.get("_compiled_call_impl") is not None
        if compiled or isinstance(module, _WRAPPERS) or cls.__name__ in _WRAPPER_NAMES:
            what = f"a compiled {cls.__name__}" if compiled else f"a {cls.__name__}"
            where = f"{name} is {what}" if name else f"got {what}"
            raise TypeError(f"{verb} the model first, then wrap it: {where}")


def why_left_alone(module: nn.Module, names: list[str]) -> str | None:
    """Why a norm of torch's or timm's is not made ours, or None: nothing keeps it from being so."""
    if reason := _why_other_class(module):
        return reason
    if len(names) > 1:
        return f"shared: it is {' and '.join(names)}"
    if module.__dict__.get(LEFT_ALONE):
        return "filter_fn"
    if "forward" in module.__dict__:
        return "its forward is patched"
    if is_patched(type(module)):
        return f"torch.nn.{type(module).__name__}.forward is patched"
    if any(name.endswith("_orig") for name in module._parameters):
        return "pruned"
    if not is_fusible(module):
        return "it has hooks"
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return f"{name} is not a parameter"
    return None


def _why_other_class(module: nn.Module) -> str | None:
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript"
    if isinstance(module, LazyModuleMixin):
        return "lazy: it has no parameters yet"
    if parametrize.is_parametrized(module):
        return "parametrised"
    if not isinstance(module, _BatchNorm):
        return f"a {cls.__name__}"
    if ours_of(cls) is None and cls not in NORMS:
        return f"a subclass of torch's that we don't know ({cls.__name__})"
    return None


def become_ours(module: Any, ours: type) -> None:
    group = module.__dict__.pop("process_group", None)
    module.__class__ = ours
    module.__dict__["__module__"] = "torch.nn"  # as modules/_leaf.py says
    if issubclass(ours, SyncBatchNorm) and group is not None:
        module.process_group = group


def become_theirs(module: Any, theirs: type) -> None:
    group = getattr(module, "process_group", None)
    for name in ("__module__", "activation", "_kept_group"):
        module.__dict__.pop(name, None)
    module.__class__ = theirs
    if issubclass(theirs, nn.SyncBatchNorm):
        module.process_group = torchs_group(group)


Filter = Callable[[nn.Module, str], bool]
