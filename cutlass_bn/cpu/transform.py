"""The map of batch normalisation, and its gradients, by PyTorch's kernels.

They compute x * a + b, which cancels where a mean is large: then the mean is subtracted first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .common import Vector, converted, dense, is_within, laid_out_like, lies_near, per_channel, times, vector_dtype
from .moments import Sums
from .moments import Sums, moments

# x * a + b errs by 3 * 2^-24 for each deviation that the mean is away: here 3e-6. y may err by 1e-5.
NEAR = 16.0
# In units of the dtype's precision: what a mean's rounding has to take to be worth a pass over x.
_LACKING = 8.0
# The same for the part of dx that is linear in x, which is no larger than dy: an error of 12 * 2^-24 of it.
_NEAR_IN_GRADIENT = 4.0
# Of the largest sum. Random errors stay below 2^-18, beyond are sums of many like terms.
_ALIKE = 2.0**-16


def batch_norm(
    x: Tensor, mean: Tensor, var: Tensor, weight: Vector, bias: Vector, eps: float, training: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's, of dense x: y; in training mean and invstd, too, and mean and var (unbiased) are written."""
    dtype = vector_dtype(x.dtype)
    vectors = (converted(vector, dtype) for vector in (weight, bias, mean, var))
    weight, bias, mean, var = vectors
    return torch.native_batch_norm(x, weight, bias, mean, var, training, 1.0, eps)


def normalised(x: Tensor, mean: Tensor, lacks: Tensor, var: Tensor, weight: Vector, bias: Vector, eps: float) -> Tensor:
    """y of dense x, exact, with a mean that `lacks` is to be added to. Of x's dtype or wider."""
    if not lies_near(mean, converted(var, mean.dtype), NEAR, eps):
        x, mean = x - per_channel(mean, x), lacks
    return batch_norm(x, mean, var, weight, bias, eps)[0]


def scaled(x: Tensor, gain: Tensor, mean: Vector = None, offset: Vector = None) -> Tensor:
    """(x - mean) * gain + offset of dense x."""
    one = torch.ones_like(gain)
    return batch_norm(x, torch.zeros_like(gain) if mean is None else mean, one, gain, offset, 0.0)[0]


def gradients(
    dy: Tensor, input: Tensor, stats: Tensor, unit: Tensor, weight: Vector, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Vector, Vector]:
    """Of y = (x - mean) * unit * weight in training, where unit is invstd: dx of input's dtype (empty where not
    wanted), sum(dy * (x - mean)) * unit and sum(dy)."""
    x, (mean, lacks, _) = dense(input), stats
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    if not is_within(lacks * unit, _LACKING * torch.finfo(x.dtype).eps):
        x, mean = x - per_channel(mean, x), lacks
    x = x.to(torch.promote_types(x.dtype, dy.dtype))
    weight, mean, unit = (converted(vector, vector_dtype(x.dtype)) for vector in (weight, mean, unit))
    dy = laid_out_like(dy.to(x.dtype), x)
    sums = Sums.of(x)
    if sums.are_short():
        dx, dot, total = _gradients(dy, x, weight, mean, unit, wanted)
        if sums.area > 1 and wanted[2]:  # in planes the sum of each is not in double
            total = channel_sum(dy)
        return dy.new_empty(0) if dx is None else dx.to(input.dtype), dot, total
    dot, total = _short_sums(dy, sums, mean)
    dot = dot * unit
    dx = dy.new_empty(0)
    if wanted[0] and x.dtype != torch.float32:
        dx, its_dot, its_total = _gradients(dy, x, weight, mean, unit, (True, True, True))
        if not (_is_alike(its_dot, dot) and _is_alike(its_total, total)):
            dx = _from_sums(dy.float(), x.float(), weight, mean, unit, dot, total)
    elif wanted[0]:
        dx = _from_sums(dy, x, weight, mean, unit, dot, total)
    return dx.to(input.dtype), dot, total


def _gradients(
    dy: Tensor, x: Tensor, weight: Vector, mean: Tensor, unit: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    """PyTorch's, None where not wanted. Its sums, also those in dx, are of float32 one by one but for planes."""
    return torch.ops.aten.native_batch_norm_backward(dy, x, weight, None, None, mean, unit, True, 0.0, wanted)


def _short_sums(dy: Tensor, sums: Sums, mean: Tensor) -> tuple[Tensor, Tensor]:
    """sum(dy * (x - mean)) and sum(dy), of few at a time."""
    calls, rest = sums.calls(arrays=8)  # of both sums, means, invstd, weights and values
    if rest:
        calls.append((sums.samples - rest, rest, 1))
    found, of_dy = [], sums._replace(x=dy)
    for call in calls:
        means = mean.repeat(call[2])
        one = torch.ones_like(means)
        found.append(_gradients(of_dy.part(*call), sums.part(*call), None, means, one, (False, True, True))[1:])
    dot, total = (torch.cat(parts).view(-1, mean.numel()).sum(0) for parts in zip(*found, strict=True))
    return dot, total


def _from_sums(dy: Tensor, x: Tensor, weight: Vector, mean: Tensor, unit: Tensor, dot: Tensor, total: Tensor) -> Tensor:
    """dx = (dy - total / n - (x - mean) * unit * dot / n) * unit * weight, for dense float32."""
    if not is_within(mean * unit, _NEAR_IN_GRADIENT):
        x, mean = x - per_channel(mean, x), torch.zeros_like(mean)
    n, gain = x.numel() // x.size(1), times(unit, weight)
    slope = unit * dot / n
    return scaled(x, -slope * gain, offset=(mean * slope - total / n) * gain).addcmul_(dy, per_channel(gain, x))


def _is_alike(sums: Tensor, exact: Tensor) -> bool:
    """Whether PyTorch's sums are good enough for a dx of half precision."""
    return is_within(sums - exact, _ALIKE * exact.abs().amax().item())


def channel_sum(grad: Tensor) -> Tensor:
    return grad.sum([dim for dim in range(grad.dim()) if dim != 1], dtype=vector_dtype(grad.dtype))


def given(gradient: Vector, dtype: torch.dtype | None, like: Tensor) -> Tensor:
    """The gradient of a vector in the dtype asked for; None: an empty tensor."""
    if gradient is None or dtype is None:
        return like.new_empty(0, dtype=torch.float32)
    return gradient.to(dtype)
