"""act(BatchNorm1d(scale * (input weight^T + bias))) of input [M, K] and weight [N, K], and its
gradients.

u [M, N] is the product, with the bias in it in half precision alone, where their sum is what is
rounded. stats [3, N]: the mean of u, what its rounding lacks, and invstd of scale * u.
fp32_products says nothing here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from .._activations import ACTIVATIONS, NAMES
from .common import Dtype, Vector, is_within, times, vector_dtype
from .moments import Sums, count, moments, stats_of, stats_of_nothing, update_running
from .transform import NEAR, argument, given, gradients, scaled

_BY_CODE = tuple(ACTIVATIONS.values())


def linear_batch_norm_training(
    input: Tensor, weight: Tensor, bias: Vector, scale: Vector, running_mean: Vector,
    running_var: Vector, num_batches_tracked: Vector, gamma: Vector, beta: Vector,
    momentum: float | None, eps: float, activation: int, dtype: torch.dtype, fp32_products: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> y [M, N] of `dtype`, u, stats."""
    u, bias = _product(input, weight, bias)
    if u.numel() == 0:
        count(num_batches_tracked)
        return u.to(dtype, copy=True), u, stats_of_nothing(u)
    found, rows = moments(u, Sums.of(u)), u.size(0)
    mean, var = found.mean_of_x().double(), times(times(found.var.double(), scale), scale)
    stats = stats_of(mean, var, eps, vector_dtype(u.dtype))
    y = argument(_computed(u, activation, dtype), stats, times(stats[2], scale), gamma, beta)
    y = _BY_CODE[activation].in_place(y).to(dtype)
    mean = times(mean if bias is None else mean + bias, scale)
    buffers = running_mean, running_var, num_batches_tracked, momentum
    update_running(*buffers, mean, var * (rows / max(rows - 1, 1)))
    return y, u, stats


def linear_batch_norm_backward(
    grad: Tensor, input: Tensor, weight: Tensor, u: Tensor, stats: Tensor, scale: Vector,
    gamma: Vector, beta: Vector, eps: float, activation: int, fp32_products: int, input_grad: bool,
    weight_grad: bool, bias_grad: Dtype, scale_grad: Dtype, gamma_grad: Dtype, beta_grad: Dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """-> the gradients of input, weight, bias (zeros: the mean takes it away), scale, gamma,
    beta."""
    if activation:
        k = times(stats[2], scale)
        v = argument(_computed(u, activation, grad.dtype), stats, k, gamma, beta)
        grad = _BY_CODE[activation].backward(grad.to(v.dtype), v)
    invstd, u_grad = stats[2].double(), input_grad or weight_grad
    k, one = times(invstd, scale), torch.ones_like(invstd)
    of_sum = scale_grad is not None or gamma_grad is not None
    unit = k if u_grad else one
    du, dot, total = gradients(grad, u, stats, unit, gamma, (u_grad, of_sum, beta_grad is not None))
    dscale = dgamma = None
    if of_sum:
        if u_grad and not k.all().item():  # dot is k times the sum, which a scale of 0 hides
            unit = one
            _, dot, _ = gradients(grad, u, stats, one, None, (False, True, False))
        assert dot is not None
        total_u = dot / unit  # sum(dv * (u - mean))
        dgamma, dscale = total_u * k, times(total_u * (eps * invstd.pow(3)), gamma)
    return (
        du @ weight if input_grad else u.new_empty(0),
        du.t() @ input if weight_grad else u.new_empty(0),
        given(None if bias_grad is None else torch.zeros_like(invstd), bias_grad, u),
        given(dscale, scale_grad, u),
        given(dgamma, gamma_grad, u),
        given(total, beta_grad, u),
    )


def linear_batch_norm_inference(
    input: Tensor, weight: Tensor, bias: Vector, scale: Vector, running_mean: Tensor,
    running_var: Tensor, gamma: Vector, beta: Vector, eps: float, activation: int,
    dtype: torch.dtype, fp32_products: int,
) -> Tensor:  # fmt: skip
    """-> y [M, N] of `dtype`, normalised by the running statistics."""
    if eps == 0.0 and not running_var.all().item():  # PyTorch's kernel multiplies infinity out
        name = NAMES[activation]
        vectors = scale, running_mean, running_var, None, gamma, beta
        return reference.linear_batch_norm(input, weight, bias, *vectors, False, 0.0, eps, name).to(
            dtype
        )
    u, bias = _product(input, weight, bias)
    if u.numel() == 0:
        return u.to(dtype)
    u = _computed(u, activation, dtype)
    invstd, mean = (running_var.double() + eps).rsqrt_(), running_mean.double()
    mean = mean if bias is None else mean - times(bias.double(), scale)  # of scale * u
    distance, gain = mean * invstd, times(times(invstd, scale), gamma)
    offset = -times(distance, gamma)
    offset = offset if beta is None else offset + beta
    if not is_within(distance, NEAR):
        centre = mean if scale is None else (mean / scale).nan_to_num_(0.0, 0.0, 0.0)
        centre = centre.to(vector_dtype(u.dtype)).nan_to_num_(0.0, 0.0, 0.0)  # none at a scale of 0
        u, offset = u - centre, offset + centre * gain
    return _BY_CODE[activation].in_place(scaled(u, gain, offset=offset)).to(dtype)


def _product(input: Tensor, weight: Tensor, bias: Vector) -> tuple[Tensor, Vector]:
    """u, and the bias that it lacks."""
    if input.dtype in (torch.float16, torch.bfloat16):
        return F.linear(input, weight, bias), None
    return F.linear(input, weight), bias


def _computed(u: Tensor, activation: int, dtype: torch.dtype) -> Tensor:
    """u in the dtype to compute a y of `dtype` in."""
    return u.to(
        torch.promote_types(
            vector_dtype(dtype) if _BY_CODE[activation].is_curved else dtype, u.dtype
        )
    )
