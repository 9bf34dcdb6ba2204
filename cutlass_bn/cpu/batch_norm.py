"""act(BatchNorm(input) + residual) over dim 1 of input [N, C, ...], and its gradients.

residual lies as it likes. after, of the backwards: what the activation's gradient takes beside
input: y of relu and leaky_relu with a residual, the residual of the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import reference
from .._activations import ACTIVATIONS
from .common import (
    Dtype,
    Vector,
    converted,
    dense,
    laid_out_like,
    lies_near,
    per_channel,
    vector_dtype,
)
from .moments import Sums, count, moments, stats_of, stats_of_nothing, update_running
from .transform import NEAR, argument, batch_norm, channel_sum, given, gradients, normalised

_BY_CODE = tuple(ACTIVATIONS.values())


def batch_norm_training(
    input: Tensor, residual: Vector, running_mean: Vector, running_var: Vector,
    num_batches_tracked: Vector, weight: Vector, bias: Vector, momentum: float | None, eps: float,
    activation: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> y; stats [3, C]: the mean, what its rounding lacks, invstd."""
    x = _computed(dense(input), residual, activation)
    buffers = running_mean, running_var, num_batches_tracked, momentum
    y, stats = _training(x, *buffers, weight, bias, eps)
    return _finished(y, residual, activation, input.dtype), stats


def _training(
    x: Tensor, running_mean: Vector, running_var: Vector, num_batches_tracked: Vector,
    momentum: float | None, weight: Vector, bias: Vector, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    input: Tensor, residual: Vector, running_mean: Tensor, running_var: Tensor, weight: Vector,
    bias: Vector, eps: float, activation: int,
) -> Tensor:  # fmt: skip
    """-> y, normalised by the running statistics."""
    x = _computed(dense(input), residual, activation)
    y = _inference(x, running_mean, running_var, weight, bias, eps)
    return _finished(y, residual, activation, input.dtype)


def _inference(
    x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Vector, bias: Vector, eps: float
) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x)
    if eps == 0.0 and not running_var.all().item():  # PyTorch's kernel multiplies infinity out
        vectors = running_mean, running_var, None, weight, bias
        return reference.batch_norm(x, *vectors, False, 0.0, eps)
    mean = converted(running_mean, vector_dtype(x.dtype))
    var = converted(running_var, mean.dtype)
    if not torch.addcmul(var, mean, mean, value=-(NEAR**-2)).amin().item() >= -eps:
        lacks = running_mean - mean
        return batch_norm(x - per_channel(mean, x), lacks, var, weight, bias, eps)[0].to(x.dtype)
    return batch_norm(x, mean, var, weight, bias, eps)[0]


def batch_norm_backward(
    grad: Tensor, input: Tensor | None, stats: Tensor | None, weight: Vector, bias: Vector,
    after: Vector, activation: int, input_grad: bool, residual_grad: bool, weight_grad: Dtype,
    bias_grad: Dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> the gradients of input, residual, weight and bias.

    Those of residual and bias alone need neither input nor stats where no activation follows.
    """

    def before() -> Tensor:
        assert input is not None
        assert stats is not None
        return argument(_computed(dense(input), after, activation), stats, stats[2], weight, bias)

    dv = _through(activation, grad, after, before)
    dx, dot, total = grad.new_empty(0), None, None
    if input is not None and stats is not None:
        wanted = (input_grad, weight_grad is not None, bias_grad is not None)
        dx, dot, total = gradients(dv, input, stats, stats[2], weight, wanted)
    elif bias_grad is not None:
        total = channel_sum(dv)
    vectors = given(dot, weight_grad, grad), given(total, bias_grad, grad)
    return dx, _dresidual(dv, grad, residual_grad), *vectors


def batch_norm_inference_backward(
    grad: Tensor, input: Tensor | None, running_mean: Vector, running_var: Vector, weight: Vector,
    bias: Vector, after: Vector, eps: float, activation: int, input_grad: bool, residual_grad: bool,
    weight_grad: Dtype, bias_grad: Dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same of inference. running_var alone gives input's gradient, in grad's layout then."""

    def before() -> Tensor:
        assert input is not None
        assert running_mean is not None
        assert running_var is not None
        x = _computed(dense(input), after, activation)
        return _inference(x, running_mean, running_var, weight, bias, eps)

    dv = _through(activation, grad, after, before)
    dx, dot, total = grad.new_empty(0), None, None
    if input_grad and running_var is not None:
        dy = dense(dv) if input is None else laid_out_like(dv, dense(input))
        zero = torch.zeros_like(running_var)
        dx = torch.empty_like(dy)
        if dy.numel():
            dx = laid_out_like(batch_norm(dy, zero, running_var, weight, None, eps)[0], dy)
        dx = dx.to(grad.dtype)
    if weight_grad and input is not None and running_mean is not None and running_var is not None:
        dtype = vector_dtype(input.dtype)
        stats = stats_of(running_mean.double(), running_var.double(), eps, dtype)
        wanted = (False, True, bias_grad is not None)
        _, dot, total = gradients(dv, input, stats, stats[2], None, wanted, of_batch=False)
    elif bias_grad is not None:
        total = channel_sum(dv)
    vectors = given(dot, weight_grad, grad), given(total, bias_grad, grad)
    return dx, _dresidual(dv, grad, residual_grad), *vectors


def _computed(x: Tensor, residual: Vector, activation: int) -> Tensor:
    """x in the dtype to compute in, so that y is rounded once."""
    once = residual is None and not _BY_CODE[activation].is_curved
    return x if once else x.to(vector_dtype(x.dtype))


def _finished(y: Tensor, residual: Vector, activation: int, dtype: torch.dtype) -> Tensor:
    y = y if residual is None else y.add_(residual)
    return _BY_CODE[activation].in_place(y).to(dtype)


def _through(activation: int, grad: Tensor, after: Vector, before: Callable[[], Tensor]) -> Tensor:
    """The gradient of what the activation is taken of; before: that, but for the residual."""
    if not activation:
        return grad
    known = after is not None and not _BY_CODE[activation].is_curved
    v = after if known else before() if after is None else before() + after
    assert v is not None
    return _BY_CODE[activation].backward(grad.to(v.dtype), v)


def _dresidual(dv: Tensor, grad: Tensor, wanted: bool) -> Tensor:
    return dv.to(grad.dtype) if wanted else grad.new_empty(0)
