"""What each process computes itself of a normalisation whose statistics are a whole group's.

`local_pieces` is the one place that chooses who does: for CPU tensors `cutlass_bn.cpu`, as exact as
the local layers. For CUDA tensors and in graphs PyTorch's own operations: float32 with vectors [C]
in float64, sums around a mean that is taken first (the squares of values 1e19 apart overflow). They
read the input more often than kernels would, synchronise nothing, and go into CUDA graphs. Kernels
for CUDA are to take their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpu import synchronised as cpu
from ..ops._autograd import wide_dtype
from ._policy import choose


class Pieces(NamedTuple):
    """Of y = activation((u - mean) * scale * invstd * gamma + beta + residual) over dim 1 of u
    [N, C, ...], which is dense.

    stats [3, C]: the group's mean, what its rounding lacks, and invstd of scale * u; float32, or
    float64 of float64. Vectors that are None are ones or zeros.

    moments(u): mean and biased variance [C] in float64, of u with at least one row.
    before_activation(u, residual, stats, scale, gamma, beta, activation, dtype): what the
        activation is taken of, a new tensor of y's dtype or wider.
    sums(dv, u, stats, scale): sum(dv) and sum(dv * (u - mean)) [C] in float64.
    input_gradient(dv, u, stats, gain, total, dot): (dv - total - (u - mean) * dot) * gain.
    """

    moments: Callable[[Tensor], tuple[Tensor, Tensor]]
    before_activation: Callable[..., Tensor]
    sums: Callable[..., tuple[Tensor, Tensor]]
    input_gradient: Callable[..., Tensor]


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view([1, -1] + [1] * (like.dim() - 2))


def reduced_dims(u: Tensor) -> list[int]:
    return [dim for dim in range(u.dim()) if dim != 1]


def _moments(u: Tensor) -> tuple[Tensor, Tensor]:
    wide, dims = u.to(wide_dtype(u)), reduced_dims(u)
    shift = torch.var_mean(wide, dims, correction=0)[1]
    var, mean = torch.var_mean(wide - per_channel(shift, u), dims, correction=0)
    return shift.double() + mean.double(), var.double()


def _before_activation(
    u: Tensor, residual: Tensor | None, stats: Tensor, scale: Tensor | None, gamma: Tensor | None,
    beta: Tensor | None, activation: str | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    wide = torch.promote_types(wide_dtype(u), dtype)
    mean, lacks, gain = stats.double()
    for factor in (scale, gamma):
        gain = gain if factor is None else gain * factor.double()
    offset = -lacks * gain if beta is None else beta.double() - lacks * gain
    gain, offset = (per_channel(vector.to(wide), u) for vector in (gain, offset))
    v = (u.to(wide) - per_channel(mean.to(wide), u)) * gain + offset
    return v if residual is None else v + residual


def _sums(dv: Tensor, u: Tensor, stats: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    mean, lacks, _ = stats
    wide, dims = torch.promote_types(wide_dtype(u), dv.dtype), reduced_dims(u)
    dv, centred = dv.to(wide), u.to(wide) - per_channel(mean, u)
    total = dv.sum(dims).double()
    return total, (dv * centred).sum(dims).double() - lacks * total


_CPU = Pieces(cpu.local_moments, cpu.before_activation, cpu.local_sums, cpu.input_gradient)
_TORCH = Pieces(_moments, _before_activation, _sums, cpu.input_gradient)


def local_pieces(u: Tensor) -> Pieces:
    return _CPU if is_looked_at(u) else _TORCH


def is_looked_at(u: Tensor) -> bool:
    """Whether decisions may depend on values: of CPU tensors in eager calls."""
    return u.is_cpu and choose(u, u.dtype, ()) == "cpu"
