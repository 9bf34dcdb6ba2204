"""Tensors that our functions don't take: such as stand for others and dispatch every operation."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = (Tensor, nn.Parameter, type(None))


def why_not_plain(tensor: Tensor | None) -> str | None:
    """What it is, "a tensor subclass (DTensor)", or None: a plain tensor, a fake one, or none."""
    if type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor):
        return None
    return f"a tensor subclass ({type(tensor).__name__})"
