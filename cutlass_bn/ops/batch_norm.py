"""The batch-norm ops of csrc/ops/batch_norm.cpp: Python entries, fake implementations, autograd formulas.

`batch_norm_stats` updates running buffers and has no gradient. `batch_norm_transform` has the gradient of batch
normalisation as a whole: its `stats` are treated as what they are, functions of `input`.
"""

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._library import library_is_loaded

if library_is_loaded():
    batch_norm_stats = torch.ops.cutlass_bn.batch_norm_stats.default
    batch_norm_transform = torch.ops.cutlass_bn.batch_norm_transform.default
    batch_norm_inference = torch.ops.cutlass_bn.batch_norm_inference.default


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view([1, -1] + [1] * (like.dim() - 2))


def _reduced_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _fake_stats(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> Tensor:
    return input.new_empty((3, input.size(1)), dtype=torch.float32)


def _fake_transform(input: Tensor, stats: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return torch.empty_like(input)


def _fake_inference(
    input: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return torch.empty_like(input)


def _save_for_transform(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, stats, weight, bias = inputs
    # The bias alone needs only sum(grad).
    ctx.needs_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
    ctx.save_for_backward(*((input, stats, weight) if ctx.needs_input else (None, None, None)))
    ctx.bias_dtype = None if bias is None else bias.dtype


def _transform_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With x^ = (x - mean) * invstd and sums over a channel's n values:

    dbias = sum(dy), dweight = sum(dy * x^), dx = weight * invstd * (dy - dbias / n - x^ * dweight / n).
    """
    needs_dx, _, needs_dweight, needs_dbias = ctx.needs_input_grad
    input, stats, weight = ctx.saved_tensors
    if ctx.needs_input and torch.is_grad_enabled():  # create_graph: the gradient has to be differentiable itself
        return _differentiable_backward(ctx, grad)
    wide_grad = grad.float()
    dbias = wide_grad.sum(_reduced_dims(grad))
    dx = dweight = None
    if ctx.needs_input:
        mean, remainder, invstd = stats.unbind()
        # In x's memory format from here on, whatever grad's is.
        centred = (input.float() - _per_channel(mean, input)).sub_(_per_channel(remainder, input))
        wide_dweight = (centred * wide_grad).sum(_reduced_dims(grad)) * invstd
        if needs_dx:
            count = max(input.numel() // max(input.size(1), 1), 1)
            gain = invstd if weight is None else invstd * weight
            # Not in place: under is_grads_batched, grad has a hidden dimension that centred has not.
            centred = centred * _per_channel(gain * invstd * wide_dweight / -count, input)
            centred.addcmul_(wide_grad, _per_channel(gain, input))
            dx = centred.sub_(_per_channel(gain * dbias / count, input)).to(input.dtype)
        if needs_dweight:
            dweight = wide_dweight.to(weight.dtype)
    return dx, None, dweight, dbias.to(ctx.bias_dtype) if needs_dbias else None


def _differentiable_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_dx, _, needs_dweight, needs_dbias = ctx.needs_input_grad
    input, stats, weight = ctx.saved_tensors
    eps: Any = 0.0
    if input.numel():
        with torch.no_grad():  # what invstd says beyond the variance
            eps = stats[2].double().pow(-2) - torch.var(input.double(), _reduced_dims(input), correction=0)
    y = reference.batch_norm(input, None, None, None, weight, None, True, 0.0, eps)
    wanted = [tensor for tensor, needed in ((input, needs_dx), (weight, needs_dweight)) if needed]
    grads = list(torch.autograd.grad(y, wanted, grad, create_graph=True))
    dx = grads.pop(0) if needs_dx else None
    dweight = grads.pop(0) if needs_dweight else None
    dbias = grad.float().sum(_reduced_dims(grad)).to(ctx.bias_dtype) if needs_dbias else None
    return dx, None, dweight, dbias


def _save_for_inference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, running_mean, running_var, weight, bias, eps = inputs
    needs_dx, needs_dweight = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    # Running buffers may be changed in place before backward: keep values, not the buffers.
    ctx.save_for_backward(
        input if needs_dweight else None,
        running_mean.to(torch.float32, copy=True) if needs_dweight else None,
        running_var.to(torch.float32, copy=True).add_(eps).rsqrt_() if needs_dx or needs_dweight else None,
        weight if needs_dx else None,
    )
    ctx.input_dtype = input.dtype
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _inference_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy * weight * invstd; the running statistics are constants. Differentiable as it stands."""
    needs_dx, _, _, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
    input, mean, invstd, weight = ctx.saved_tensors
    wide_grad = grad.float()
    dx = dweight = dbias = None
    if needs_dx:
        gain = invstd if weight is None else invstd * weight
        dx = (wide_grad * _per_channel(gain, grad)).to(ctx.input_dtype)
    if needs_dweight:
        centred = input.float() - _per_channel(mean, input)
        dweight = ((centred * wide_grad).sum(_reduced_dims(grad)) * invstd).to(ctx.weight_dtype)
    if needs_dbias:
        dbias = wide_grad.sum(_reduced_dims(grad)).to(ctx.bias_dtype)
    return dx, None, None, dweight, dbias, None


if library_is_loaded():
    torch.library.register_fake("cutlass_bn::batch_norm_stats", _fake_stats)
    torch.library.register_fake("cutlass_bn::batch_norm_transform", _fake_transform)
    torch.library.register_fake("cutlass_bn::batch_norm_inference", _fake_inference)
    torch.library.register_autograd(
        "cutlass_bn::batch_norm_transform", _transform_backward, setup_context=_save_for_transform
    )
    torch.library.register_autograd(
        "cutlass_bn::batch_norm_inference", _inference_backward, setup_context=_save_for_inference
    )
