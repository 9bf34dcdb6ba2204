"""What each process computes of a normalisation whose statistics are a whole group's, exact as in
batch_norm.py: functional/_local.py says what of."""

from __future__ import annotations

import torch
from torch import Tensor

from .._activations import ACTIVATIONS
from .common import Vector, laid_out_like, times, vector_dtype
from .moments import Sums, moments
from .transform import argument, gradients


def local_moments(u: Tensor) -> tuple[Tensor, Tensor]:
    """Of dense u, not empty: mean and biased variance [C], float64."""
    found = moments(u, Sums.of(u))
    return found.mean_of_x().double(), found.var.double()


def before_activation(
    u: Tensor, residual: Vector, stats: Tensor, scale: Vector, gamma: Vector, beta: Vector,
    activation: str | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """(u - mean) * scale * invstd * gamma + beta + residual of dense u. A new tensor, of `dtype`
    where that is rounded once, or wider."""
    once = residual is None and not ACTIVATIONS[activation].is_curved and dtype == u.dtype
    wide = dtype if once else torch.promote_types(vector_dtype(u.dtype), dtype)
    v = argument(u.to(wide), stats, times(stats[2], scale), gamma, beta)
    return v if residual is None else v.add_(residual)


def local_sums(dv: Tensor, u: Tensor, stats: Tensor, scale: Vector) -> tuple[Tensor, Tensor]:
    """sum(dv) and sum(dv * (u - mean)) [C], float64."""
    invstd = stats[2]
    unit = times(invstd, scale)
    unit = torch.where(unit == 0.0, invstd, unit)  # which would hide the sum
    wanted = (False, True, True)
    _, dot, total = gradients(dv, u, stats, unit, None, wanted, of_batch=False)
    assert dot is not None
    assert total is not None
    return total.double(), dot.double() / unit


def input_gradient(
    dv: Tensor, u: Tensor, stats: Tensor, gain: Tensor, total: Tensor, dot: Tensor
) -> Tensor:
    """(dv - total - (u - mean) * dot) * gain, of u's dtype and layout; vectors [C] in float64."""
    mean, lacks, _ = stats
    shape = [1, -1] + [1] * (u.dim() - 2)
    wide = torch.promote_types(vector_dtype(u.dtype), dv.dtype)
    total, dot, gain = (vector.to(wide).view(shape) for vector in (total - lacks * dot, dot, gain))
    dv = laid_out_like(dv, u)
    du = torch.addcmul(dv - total, u - mean.view(shape), dot, value=-1.0)
    return laid_out_like((du * gain).to(u.dtype), u)
