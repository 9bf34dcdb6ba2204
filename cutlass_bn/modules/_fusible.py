"""Which modules of torch's a fused function may stand for, asked at every call: cheaply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

LEFT_ALONE = "_left_alone_by_convert"  # set on a module that convert's filter_fn refused

NORMS: set[type] = set()  # our modules, by exact class

# Of the exact types of activations, the name of what an instance computes; None: not one of ours.
ACTIVATION_OF: dict[type, Callable[[Any], str | None]] = {
    nn.ReLU: lambda module: "relu",
    nn.LeakyReLU: lambda module: "leaky_relu" if module.negative_slope == 0.01 else None,
    nn.GELU: lambda module: "gelu" if module.approximate == "none" else None,
    nn.SiLU: lambda module: "silu",
}
# Of classes of torch's that we stand for or look through, before anyone patches them.
_THEIRS: tuple[Any, ...] = (
    *ACTIVATION_OF,
    *(nn.Identity, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_FORWARDS = {cls: cls.forward for cls in _THEIRS}


def is_patched(cls: Any) -> bool:
    """Whether someone gave a class of torch's another forward."""
    return cls.forward is not _FORWARDS.get(cls, cls.forward)


def is_fusible(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's own forward, and no more."""
    attributes = module.__dict__
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in attributes
        or LEFT_ALONE in attributes
        or is_patched(type(module))
    )


def activation_of(module: nn.Module) -> str | None:
    """The activation that may be computed in the module's place, or None."""
    name_of = ACTIVATION_OF.get(type(module))
    return name_of(module) if name_of is not None and is_fusible(module) else None


def is_identity(module: nn.Module) -> bool:
    return type(module) is nn.Identity and is_fusible(module)
