"""BatchNorm over dim 1 of input [N, C, ...], and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from .common import Dtype, Vector, converted, dense, laid_out_like, lies_near, vector_dtype
from .moments import Sums, count, moments, stats_of, stats_of_nothing, update_running
from .transform import NEAR, batch_norm, channel_sum, given, gradients, normalised


def batch_norm_training(
    input: Tensor, running_mean: Vector, running_var: Vector, num_batches_tracked: Vector,
    weight: Vector, bias: Vector, momentum: float | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> y; stats [3, C]: the mean, what its rounding lacks, invstd."""
    x = dense(input)
    if x.numel() == 0:
        count(num_batches_tracked)
        return torch.empty_like(x), stats_of_nothing(x)
    buffers = running_mean, running_var, num_batches_tracked, momentum
    dtype, values = vector_dtype(x.dtype), x.numel() // x.size(1)
    sums, known = Sums.of(x), None
    if sums.are_short():  # statistics and y in one call
        mean, unbiased = x.new_zeros((2, x.size(1)), dtype=dtype).unbind()
        y, _, invstd = batch_norm(x, mean, unbiased, weight, bias, eps, training=True)
        if lies_near(mean, unbiased, min(NEAR, sums.reach)):
            update_running(*buffers, mean, unbiased)
            return y, torch.stack((mean, torch.zeros_like(mean), invstd))
        known = mean, unbiased * ((values - 1) / values)
    near, mean, var, shift = moments(x, sums, known)
    rounded = mean.to(dtype)
    y = normalised(near, rounded, mean - rounded, var, weight, bias, eps).to(x.dtype)
    mean = mean if shift is None else mean + shift
    stats = stats_of(mean, var, eps, dtype)
    update_running(*buffers, mean, var * (values / max(values - 1, 1)))
    return y, stats


def batch_norm_inference(
    input: Tensor, running_mean: Tensor, running_var: Tensor, weight: Vector, bias: Vector, eps: float
) -> Tensor:
    """-> y, normalised by the running statistics."""
    x = dense(input)
    if x.numel() == 0:
        return torch.empty_like(x)
    if eps == 0.0 and not running_var.all().item():  # PyTorch's kernel multiplies infinity out
        return reference.batch_norm(x, running_mean, running_var, None, weight, bias, False, 0.0, eps)
    mean = converted(running_mean, vector_dtype(x.dtype))
    return normalised(x, mean, running_mean - mean, running_var, weight, bias, eps).to(x.dtype)


def batch_norm_backward(
    grad: Tensor, input: Tensor | None, stats: Tensor | None, weight: Vector,
    input_grad: bool, weight_grad: Dtype, bias_grad: Dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """-> the gradients of input, weight and bias. That of bias alone needs neither input nor stats."""
    dx, dot, total = grad.new_empty(0), None, None
    if input is not None and stats is not None:
        wanted = (input_grad, weight_grad is not None, bias_grad is not None)
        dx, dot, total = gradients(grad, input, stats, stats[2], weight, wanted)
    elif bias_grad is not None:
        total = channel_sum(grad)
    return dx, given(dot, weight_grad, grad), given(total, bias_grad, grad)


def batch_norm_inference_backward(
    grad: Tensor, input: Tensor | None, running_mean: Vector, running_var: Vector, weight: Vector,
    eps: float, input_grad: bool, weight_grad: Dtype, bias_grad: Dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same of inference. running_var alone gives input's gradient, in grad's layout then."""
    dx, dot, total = grad.new_empty(0), None, None
    if input_grad and running_var is not None:
        dy = dense(grad) if input is None else laid_out_like(grad, dense(input))
        zero = torch.zeros_like(running_var)
        dx = torch.empty_like(dy)
        if dy.numel():
            dx = laid_out_like(batch_norm(dy, zero, running_var, weight, None, eps)[0], dy)
    if weight_grad and input is not None and running_mean is not None and running_var is not None:
        stats = stats_of(running_mean.double(), running_var.double(), eps, vector_dtype(input.dtype))
        _, dot, total = gradients(
            grad, input, stats, stats[2], None, (False, True, bias_grad is not None), of_batch=False
        )
    elif bias_grad is not None:
        total = channel_sum(grad)
    return dx, given(dot, weight_grad, grad), given(total, bias_grad, grad)
