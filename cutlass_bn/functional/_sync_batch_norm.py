"""Normalisation by statistics of a whole process group: one collective a pass.

Forward: each process gathers everybody's count, mean and variance, and merges them in the order of
ranks by Chan's formula, in float64: so all have the same bits. Backward: the two sums over dv are
reduced over the group; the parameters' gradients are local, as torch's.
Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances,
1979.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._activations import ACTIVATIONS
from ..cpu.common import dense
from ..ops._autograd import gradients_by_formula, wide_dtype
from ..reference import HALVES, autocast_dtype
from ._collectives import Group, all_gather, all_reduce
from ._local import is_looked_at, local_pieces, per_channel, reduced_dims
from ._policy import is_traced, output_dtype

Buffers = tuple[Tensor | None, Tensor | None, Tensor | None]  # running mean and variance, counter


def batch_norm(
    input: Tensor,
    residual: Tensor | None,
    buffers: Buffers,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
    activation: str | None,
    group: Group,
) -> Tensor:
    """activation(batch_norm(input) + residual) in training, with the statistics of all processes.

    Raises:
        ValueError: one value per channel over all processes, on each of them, before anything has
            changed. In graphs and on CUDA, where to ask would synchronise, y is then
            activation(bias + residual), and the buffers stay as they are.
    """
    layer = input, residual, None, weight, bias, None
    return _normalise(*layer, None, buffers, momentum, eps, activation, input.dtype, group)


def linear_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    buffers: Buffers,
    gamma: Tensor | None,
    beta: Tensor | None,
    momentum: float | None,
    eps: float,
    activation: str | None,
    group: Group,
) -> Tensor:
    """activation(batch_norm(scale * linear(input, weight, bias))), likewise.

    The Linear's bias has no part in y. In half precision it is in what is rounded, else in the
    running mean alone.
    """
    rounded = bias is not None and autocast_dtype(input) in HALVES
    u = F.linear(input, weight, bias.detach() if bias is not None and rounded else None)
    offset = None if rounded or bias is None else bias.detach()
    dtype = output_dtype(input, scale)
    layer = u, None, scale, gamma, beta, bias
    return _normalise(*layer, offset, buffers, momentum, eps, activation, dtype, group)


def _normalise(
    input: Tensor,
    residual: Tensor | None,
    scale: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    cancelled: Tensor | None,
    offset: Tensor | None,
    buffers: Buffers,
    momentum: float | None,
    eps: float,
    activation: str | None,
    dtype: torch.dtype,
    group: Group,
) -> Tensor:
    """cancelled: a vector whose gradient is zero, and not a missing one. offset: a part of the
    running mean that is not in input."""
    u = dense(input)
    with torch.no_grad():
        count, mean, var = _group_moments(u, group)
        if count.is_cpu and is_looked_at(u) and count.item() == 1.0:
            raise ValueError(
                "Expected more than 1 value per channel when training, got 1 over all processes, "
                f"input size {input.shape} in this one"
            )
        if scale is not None:
            var = var * scale.double().square()
        rounded = mean.to(wide_dtype(u))
        stats = torch.stack((rounded, mean - rounded, (var + eps).rsqrt())).to(rounded.dtype)
        mean = mean if offset is None else mean + offset
        mean = mean if scale is None else mean * scale
        _update(buffers, count, mean, var, momentum)
    how = eps, activation, dtype, group
    y: Tensor = _Normalised.apply(u, residual, scale, gamma, beta, cancelled, stats, count, *how)
    return y


def _group_moments(u: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Of all processes: how many values a channel has [1], mean and biased variance [C], in
    float64."""
    values = u.size(0) * u.shape[2:].numel()
    count = u.new_full((1,), values, dtype=torch.float64)
    if u.numel() == 0:
        mean = var = count.new_zeros(u.size(1))
    else:
        mean, var = local_pieces(u).moments(u)
    return _merged(*_unpacked(all_gather(_packed(count, mean, var, wide_dtype(u)), group)))


def _packed(count: Tensor, mean: Tensor, var: Tensor, dtype: torch.dtype) -> Tensor:
    """[2 + 3 * C] of `dtype`: count and means, what their rounding lacks, the roots of M2.

    In two parts counts are exact beyond 2^24. M2, the sum of squares, might overflow.
    """
    wide = torch.cat((count, mean))
    high = wide.to(dtype)
    return torch.cat((high, (wide - high).to(dtype), (var * count).sqrt().to(dtype)))


def _unpacked(gathered: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[size, 2 + 3 * C] -> counts [size, 1], means [size, C], M2 [size, C], float64."""
    channels = gathered.size(1) // 3
    high, low, root = gathered.double().split((channels + 1, channels + 1, channels), 1)
    counts, means = (high + low).split((1, channels), 1)
    return counts, means, root.square()


def _merged(counts: Tensor, means: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of [size, 1], [size, C], [size, C]; processes without values have no say.

    Around the mean of the process with most values: equal means stay as they are.
    """
    count = counts.sum(0)
    some = count.clamp(min=1.0)
    shift = means.index_select(0, counts.argmax(0))
    apart = torch.where(counts > 0.0, means - shift, 0.0)
    mean = (apart * counts).sum(0) / some
    m2 = (m2 + counts * (apart - mean).square()).sum(0)
    return count, shift[0] + mean, m2 / some


def _update(
    buffers: Buffers, count: Tensor, mean: Tensor, var: Tensor, momentum: float | None
) -> None:
    """The running statistics, and the batch is counted, where there are two values or more."""
    running_mean, running_var, counter = buffers
    counts = count > 1.0
    if running_mean is not None and running_var is not None:
        factor: Any = momentum
        if momentum is None:
            assert counter is not None
            factor = (counter.to(mean.device).double() + 1.0).reciprocal()
        unbiased = var * (count / (count - 1.0).clamp(min=1.0))
        for running, batch in ((running_mean, mean), (running_var, unbiased)):
            updated = running.double() * (1.0 - factor) + batch * factor
            running.copy_(torch.where(counts, updated, running))
    if counter is not None:
        counter.add_(counts[0].to(counter.device))


class _Normalised(torch.autograd.Function):
    """The transform by statistics that are known, whose gradient is that of the whole layer."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        residual: Tensor | None,
        scale: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        cancelled: Tensor | None,
        stats: Tensor,
        count: Tensor,
        eps: float,
        activation: str | None,
        dtype: torch.dtype,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(
            u, residual if activation else None, scale, gamma, beta, cancelled, stats, count
        )
        ctx.eps, ctx.activation, ctx.dtype, ctx.group = eps, activation, dtype, group
        ctx.residual_dtype = None if residual is None else residual.dtype
        v = local_pieces(u).before_activation(
            u, residual, stats, scale, gamma, beta, activation, dtype
        )
        y = ACTIVATIONS[activation].forward(v)
        # Under torch.compile of 2.11 a `to` that changes nothing ends the gradient.
        return y if y.dtype == dtype else y.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        u, residual, scale, gamma, beta, cancelled, stats, count = ctx.saved_tensors
        needed = ctx.needs_input_grad
        zero = torch.zeros_like(cancelled) if needed[5] else None
        if not is_traced() and torch.is_grad_enabled():
            found = _differentiable_gradients(ctx, grad)
            return *found, zero, *(None,) * 6
        local, dv = local_pieces(u), grad
        if ctx.activation is not None:
            v = local.before_activation(
                u, residual, stats, scale, gamma, beta, ctx.activation, ctx.dtype
            )
            dv = ACTIVATIONS[ctx.activation].backward(grad.to(v.dtype), v)
        total, dot = local.sums(dv, u, stats, scale)
        invstd = stats[2].double()
        unit = invstd if scale is None else invstd * scale.double()
        # dot in units of the deviation: u may be huge.
        sums = torch.stack((total, dot * unit)).to(stats.dtype)
        total_mean, dot_mean = all_reduce(sums, ctx.group).double() / count.clamp(min=1.0)
        du = dscale = None
        if needed[0]:
            gain = unit if gamma is None else unit * gamma.double()
            du = local.input_gradient(dv, u, stats, gain, total_mean, dot_mean * unit)
        if needed[2]:
            dscale = dot * (ctx.eps * invstd.pow(3))
            dscale = (dscale if gamma is None else dscale * gamma.double()).to(scale.dtype)
        return (
            du,
            dv.to(ctx.residual_dtype) if needed[1] else None,
            dscale,
            (dot * unit).to(gamma.dtype) if needed[3] else None,
            total.to(beta.dtype) if needed[4] else None,
            zero,
            *(None,) * 6,
        )


class _Reduced(torch.autograd.Function):
    """The sum over a group, differentiable any number of times: its gradient is such a sum, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Reduced.apply(grad, ctx.group), None


def _differentiable_gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """Those of u, residual, scale, gamma, beta, from the definition in float64: collectives of its
    own, which all processes have to make alike."""
    u, residual, scale, gamma, beta, _, _, count = ctx.saved_tensors
    some = count.clamp(min=1.0)

    def formula(u: Tensor, *others: Tensor | None) -> Tensor:
        residual, scale, gamma, beta = others
        wide, dims = u.double(), reduced_dims(u)
        mean = _Reduced.apply(wide.sum(dims), ctx.group) / some
        centred = wide - per_channel(mean, u)
        var = _Reduced.apply(centred.square().sum(dims), ctx.group) / some
        if scale is not None:
            centred, var = centred * per_channel(scale.double(), u), var * scale.double().square()
        gain = (var + ctx.eps).rsqrt()
        gain = gain if gamma is None else gain * gamma.double()
        v = centred * per_channel(gain, u)
        for term in (None if beta is None else per_channel(beta.double(), u), residual):
            v = v if term is None else v + term
        return ACTIVATIONS[ctx.activation].forward(v).to(ctx.dtype)

    needs = list(ctx.needs_input_grad[:5])
    # Without an activation the residual was not kept.
    of_residual = grad if needs[1] and ctx.activation is None else None
    needs[1] = needs[1] and of_residual is None
    if not any(needs):
        return [None, of_residual, None, None, None]
    found = gradients_by_formula(formula, (u, residual, scale, gamma, beta), needs, grad)
    found[1] = found[1] if of_residual is None else of_residual
    return found
