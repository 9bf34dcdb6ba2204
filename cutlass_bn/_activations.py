"""The activations that can follow a normalisation, by the name that our modules and functions
take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


class Activation(NamedTuple):
    """y = forward(v). backward(dy, v) is the gradient of v. is_curved: taken of float32, before
    half precision rounds."""

    forward: Callable[[Tensor], Tensor]
    in_place: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    is_curved: bool = False


# In the order of the codes of csrc/common/activation.h.
ACTIVATIONS: dict[str | None, Activation] = {
    None: Activation(lambda v: v, lambda v: v, lambda dy, v: dy),
    "relu": Activation(F.relu, torch.relu_, lambda dy, v: _aten.threshold_backward(dy, v, 0.0)),
    "gelu": Activation(F.gelu, _aten.gelu_, _aten.gelu_backward, True),
    "silu": Activation(F.silu, lambda v: F.silu(v, inplace=True), _aten.silu_backward, True),
    "leaky_relu": Activation(
        F.leaky_relu,
        lambda v: F.leaky_relu(v, inplace=True),
        lambda dy, v: _aten.leaky_relu_backward(dy, v, 0.01, False),
    ),
}
NAMES = tuple(ACTIVATIONS)
CODES = {name: code for code, name in enumerate(NAMES)}


def check_activation(activation: str | None) -> None:
    if activation not in ACTIVATIONS:
        *names, last = (repr(name) for name in NAMES)
        raise ValueError(f"activation: expected {', '.join(names)} or {last}, got {activation!r}")
