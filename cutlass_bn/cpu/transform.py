"""The map of batch normalisation, and its gradients, by PyTorch's kernels.

They compute x * a + b, which cancels where a mean is large: then the mean is subtracted first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import (
    Vector,
    converted,
    dense,
    is_within,
    laid_out_like,
    lies_near,
    per_channel,
    times,
    vector_dtype,
)
from .moments import Sums, moments

# x * a + b errs by 3 * 2^-24 for each deviation that the mean is away: here 3e-6. y may err by
# 1e-5.
NEAR = 16.0
# In units of the dtype's precision: what a mean's rounding has to take to be worth a pass over x.
_LACKING = 8.0


def batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Vector,
    bias: Vector,
    eps: float,
    training: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's, of dense x: y; in training mean and invstd, too, and mean and var (unbiased) are
    written."""
    dtype = vector_dtype(x.dtype)
    vectors = (converted(vector, dtype) for vector in (weight, bias, mean, var))
    weight, bias, mean, var = vectors
    return torch.native_batch_norm(x, weight, bias, mean, var, training, 1.0, eps)


def normalised(
    x: Tensor, mean: Tensor, lacks: Tensor, var: Tensor, weight: Vector, bias: Vector, eps: float
) -> Tensor:
    """y of dense x, exact, with a mean that `lacks` is to be added to. Of x's dtype or wider."""
    if not lies_near(mean, converted(var, mean.dtype), NEAR, eps):
        x, mean = x - per_channel(mean, x), lacks
    return batch_norm(x, mean, var, weight, bias, eps)[0]


def scaled(x: Tensor, gain: Tensor, mean: Vector = None, offset: Vector = None) -> Tensor:
    """(x - mean) * gain + offset of dense x."""
    one = torch.ones_like(gain)
    mean = torch.zeros_like(gain) if mean is None else mean
    return batch_norm(x, mean, one, gain, offset, 0.0)[0]


def argument(x: Tensor, stats: Tensor, k: Tensor, gamma: Vector, beta: Vector) -> Tensor:
    """What an activation is taken of in training: (x - mean) * k * gamma + beta, exact."""
    mean, lacks, _ = stats
    if x.numel() == 0:
        return torch.empty_like(x)
    if not is_within(mean * k, NEAR):
        x, mean = x - per_channel(mean, x), lacks
    return scaled(x, times(k, gamma), mean, beta)


def gradients(
    dy: Tensor, input: Tensor, stats: Tensor, unit: Tensor, weight: Vector,
    wanted: tuple[bool, bool, bool], of_batch: bool = True,
) -> tuple[Tensor, Vector, Vector]:  # fmt: skip
    """Of y = (x - mean) * unit * weight in training, where unit is invstd: dx of input's dtype
    (empty where not wanted), sum(dy * (x - mean)) * unit and sum(dy). of_batch: the mean is that of
    x.

    PyTorch's kernel adds up float32 one by one, and half precision too: dy is centred where that
    would lose its part that the normalisation lets through.
    """
    x, (mean, lacks, _) = dense(input), stats
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    values = x.numel() // x.size(1)
    off_centre = lacks  # the mean of x - mean
    if not is_within(lacks * unit, _LACKING * torch.finfo(x.dtype).eps):
        x, mean, off_centre = x - per_channel(mean, x), lacks, torch.zeros_like(lacks)
    centre = _centre(dy)
    if centre is None:
        centre = torch.zeros_like(unit, dtype=torch.float64)
    else:
        dy, centre = dy - per_channel(centre, dy), centre.double()
        if not of_batch:
            off_centre = moments(x, Sums.of(x)).mean_of_x() - mean
    dtype = torch.promote_types(x.dtype, dy.dtype)
    x = x.to(dtype)
    dy = laid_out_like(dy.to(dtype), x)
    vectors = (
        converted(vector, vector_dtype(dtype)) for vector in (weight, None, None, mean, unit)
    )
    dx, dot, total = torch.ops.aten.native_batch_norm_backward(dy, x, *vectors, True, 0.0, wanted)
    dx = dy.new_empty(0) if dx is None else laid_out_like(dx.to(input.dtype), dense(input))
    dot = None if dot is None else dot + centre * (off_centre * values) * unit
    return dx, dot, None if total is None else total + centre * values


def _centre(dy: Tensor) -> Vector:
    """[C] to take from dy, or None where its means are within a deviation of zero, as a few samples
    show."""
    plane = dy[0, 0].numel()
    rows = 128 // min(plane, 16)  # fewer samples would often take chance for a mean
    samples = dy[:: max(1, dy.size(0) // rows)].reshape(-1, dy.size(1), plane)
    samples = samples[..., :: max(1, plane // 16)]
    var, mean = torch.var_mean(samples.to(vector_dtype(dy.dtype)), (0, 2), correction=0)
    far = (mean.square() > var) & mean.isfinite()  # what isn't finite has no say
    return torch.where(far, mean, 0.0) if far.any() else None


def channel_sum(grad: Tensor) -> Tensor:
    return grad.sum([dim for dim in range(grad.dim()) if dim != 1], dtype=vector_dtype(grad.dtype))


def given(gradient: Vector, dtype: torch.dtype | None, like: Tensor) -> Tensor:
    """The gradient of a vector in the dtype asked for; None: an empty tensor."""
    if gradient is None or dtype is None:
        return like.new_empty(0, dtype=torch.float32)
    return gradient.to(dtype)
