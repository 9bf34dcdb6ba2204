"""The batch-norm ops of csrc/ops/batch_norm*.cpp: fake implementations and gradients.

`batch_norm_training` updates running buffers and is differentiable in input, residual, weight and
bias through y. The gradients are ops themselves; where a graph of them is asked for (create_graph)
formulas in plain PyTorch take their place.

`cutlass_bn.cpu` has the same functions for CPU tensors. They are no registered ops, and need no
library: `CPU` is what eager calls take of them, with the gradients that the ops have, as `CUDA` is
of the ops.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import cpu, reference
from .._activations import ACTIVATIONS, NAMES
from .._library import library_is_loaded
from ._autograd import (
    Kernels,
    Op,
    Pass,
    differentiable,
    gradients_by_formula,
    on_autograd_key,
    over_a_batch,
    take_any_layout,
    takes_formula,
    wide_dtype,
)
from ._layout import dense, memory_format

if library_is_loaded():
    batch_norm_training = torch.ops.cutlass_bn.batch_norm_training.default
    batch_norm_inference = torch.ops.cutlass_bn.batch_norm_inference.default
    # -> dx, dresidual, dweight, dbias; what they take is in csrc/ops/library.cpp.
    batch_norm_backward = torch.ops.cutlass_bn.batch_norm_backward.default
    batch_norm_inference_backward = torch.ops.cutlass_bn.batch_norm_inference_backward.default
    batch_norm_plan = torch.ops.cutlass_bn.batch_norm_plan.default


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view([1, -1] + [1] * (like.dim() - 2))


def _sum(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x)).sum(_reduced_dims(x))


def _reduced_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _fake_training(input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_inference(input), input.new_empty((3, input.size(1)), dtype=torch.float32)


def _fake_inference(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(dense(input))


def _fake_backward(grad: Tensor, input: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    *_, input_grad, residual_grad, weight_grad, bias_grad = others

    def vector(dtype: torch.dtype | None) -> Tensor:
        size = 0 if dtype is None else grad.size(1)
        return grad.new_empty((size,), dtype=dtype or torch.float32)

    def matrix(asked: bool) -> Tensor:
        if not asked:
            return grad.new_empty((0,))
        return torch.empty_like(dense(grad if input is None else input))

    return matrix(input_grad), matrix(residual_grad), vector(weight_grad), vector(bias_grad)


def _after(activation: int, residual: Tensor | None, y: Tensor) -> Tensor | None:
    """What the activation's gradient takes beside input."""
    if residual is None or not activation:
        return None
    return residual if ACTIVATIONS[NAMES[activation]].is_curved else y


class _Asked(NamedTuple):
    """What a gradient is asked for. That of the residual is grad itself where nothing follows."""

    input: bool
    residual: bool
    weight: bool
    bias: bool

    @classmethod
    def of(cls, ctx: Any, weight: int) -> _Asked:
        """weight: the argument's number, which bias follows."""
        needed = ctx.needs_input_grad
        return cls(needed[0], needed[1], needed[weight], needed[weight + 1])

    def of_op(self, ctx: Any) -> tuple[Any, ...]:
        """The op's last arguments."""
        residual = self.residual and ctx.activation != 0
        dweight = ctx.weight_dtype if self.weight else None
        return self.input, residual, dweight, ctx.bias_dtype if self.bias else None

    def given(self, ctx: Any, grad: Tensor, gradients: Any) -> list[Tensor | None]:
        """What the op gave of it, in the order of this class."""
        dx, dresidual, dweight, dbias = gradients
        if ctx.activation == 0:
            dresidual = grad
        found = (dx, dresidual, dweight, dbias)
        return [gradient if asked else None for gradient, asked in zip(found, self, strict=True)]


def _keep_dtypes(ctx: Any, weight: Tensor | None, bias: Tensor | None, activation: int) -> None:
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.activation = activation


def _save_for_training(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    input, residual, _, _, _, weight, bias, _, _, activation = inputs
    y, stats = outputs
    # The gradients of residual and bias alone need only grad.
    if activation or input.requires_grad or (weight is not None and weight.requires_grad):
        after = _after(activation, residual, y)
        ctx.save_for_backward(input, stats, weight, bias if activation else None, after)
    else:
        ctx.save_for_backward(None, None, None, None, None)
    _keep_dtypes(ctx, weight, bias, activation)


def _training_backward(op: Op, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    asked = _Asked.of(ctx, weight=5)
    if takes_formula(grad):
        found = _differentiable_gradients(ctx, asked, grad)
    else:
        gradients = op(grad, *ctx.saved_tensors, ctx.activation, *asked.of_op(ctx))
        found = asked.given(ctx, grad, gradients)
    dx, dresidual, dweight, dbias = found
    return dx, dresidual, None, None, None, dweight, dbias, None, None, None


def _through_activation(ctx: Any, grad: Tensor, after: Tensor | None) -> tuple[Tensor, int]:
    """(grad, activation) past an activation that is known from y alone."""
    activation = ACTIVATIONS[NAMES[ctx.activation]]
    if after is None or activation.is_curved:
        return grad, ctx.activation
    return activation.backward(grad, after.detach()), 0


def _by_definition(
    asked: _Asked,
    grad: Tensor,
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    statistics: tuple[Tensor | None, Tensor | None],
    eps: Any,
    activation: int,
) -> list[Tensor | None]:
    """The gradients, differentiable. tensors: input, residual, weight, bias."""
    of_batch, name = statistics[0] is None, NAMES[activation]

    def y(input: Tensor, residual: Tensor | None, *affine: Tensor | None) -> Tensor:
        weight, bias = affine
        vectors = *statistics, None, weight, bias
        return reference.batch_norm(input, *vectors, of_batch, 0.0, eps, name, residual)

    return gradients_by_formula(y, tensors, asked, grad)


def _differentiable_gradients(ctx: Any, asked: _Asked, grad: Tensor) -> list[Tensor | None]:
    input, stats, weight, bias, after = ctx.saved_tensors
    with torch.enable_grad():
        grad, activation = _through_activation(ctx, grad, after)
        eps: Any = 0.0
        if input is not None and input.numel():
            with torch.no_grad():  # what invstd says beyond the variance
                variance = torch.var(input.double(), _reduced_dims(input), correction=0)
                eps = stats[2].double().pow(-2) - variance
        if activation:
            tensors = input, after, weight, bias
            return _by_definition(asked, grad, tensors, (None, None), eps, activation)
        dbias = _sum(grad).to(ctx.bias_dtype) if asked.bias else None
        dx = dweight = None
        if asked.input or asked.weight:
            of_input = asked._replace(residual=False, bias=False)
            tensors = input, None, weight, None
            found = _by_definition(of_input, grad, tensors, (None, None), eps, 0)
            dx, _, dweight, _ = found
    return [dx, grad if asked.residual else None, dweight, dbias]


def _save_for_inference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, residual, running_mean, running_var, weight, bias, eps, activation = inputs
    needs_dx, needs_dweight = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    # Running buffers may be changed in place before backward: keep values, not the buffers.
    with_x = bool(activation) or needs_dweight
    ctx.save_for_backward(
        input if with_x else None,
        running_mean.clone() if with_x else None,
        running_var.clone() if with_x or needs_dx else None,
        weight if needs_dx or activation else None,
        bias if activation else None,
        _after(activation, residual, output),
    )
    ctx.eps, ctx.format = eps, None if with_x else memory_format(input)
    _keep_dtypes(ctx, weight, bias, activation)


def _inference_backward(op: Op, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.format is not None:  # dx takes its layout from grad
        grad = grad.contiguous(memory_format=ctx.format)
    asked = _Asked.of(ctx, weight=4)
    if takes_formula(grad):
        found = _differentiable_inference_gradients(ctx, asked, grad)
    else:
        gradients = op(grad, *ctx.saved_tensors, ctx.eps, ctx.activation, *asked.of_op(ctx))
        found = asked.given(ctx, grad, gradients)
    dx, dresidual, dweight, dbias = found
    return dx, dresidual, None, None, dweight, dbias, None, None


def _differentiable_inference_gradients(
    ctx: Any, asked: _Asked, grad: Tensor
) -> list[Tensor | None]:
    """Without an activation dx = dy * weight * invstd, and that without input."""
    input, mean, var, weight, bias, after = ctx.saved_tensors
    wide = wide_dtype(grad)
    with torch.enable_grad():
        grad, activation = _through_activation(ctx, grad, after)
        if activation:
            tensors = input, after, weight, bias
            return _by_definition(asked, grad, tensors, (mean, var), ctx.eps, activation)
        invstd = None if var is None else torch.rsqrt(var.to(wide) + ctx.eps)
        dx = dweight = None
        if asked.input:
            assert invstd is not None
            gain = invstd if weight is None else invstd * weight
            dx = (grad.to(wide) * _per_channel(gain, grad)).to(grad.dtype)
        if asked.weight:
            assert invstd is not None
            centred = input.to(wide) - _per_channel(mean.to(wide), input)
            dweight = (_sum(centred * grad.to(wide)) * invstd).to(ctx.weight_dtype)
        dbias = _sum(grad).to(ctx.bias_dtype) if asked.bias else None
    return [dx, grad if asked.residual else None, dweight, dbias]


_NAME = "BatchNorm"  # in autograd's graph


def _kernels(training: Op, inference: Op, backward: Op, inference_backward: Op) -> Kernels:
    of_training = functools.partial(_training_backward, backward)
    of_inference = functools.partial(_inference_backward, inference_backward)
    return Kernels(
        Pass(
            training,
            differentiable(_NAME, training, _save_for_training, of_training, first=True),
        ),
        Pass(inference, differentiable(_NAME, inference, _save_for_inference, of_inference)),
    )


CPU = _kernels(
    cpu.batch_norm_training,
    cpu.batch_norm_inference,
    cpu.batch_norm_backward,
    cpu.batch_norm_inference_backward,
)


def _register() -> None:
    fakes: dict[str, Op] = {
        "training": _fake_training,
        "inference": _fake_inference,
        "backward": _fake_backward,
        "inference_backward": _fake_backward,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"cutlass_bn::batch_norm_{name}", fake)
    op, backward = batch_norm_training, batch_norm_backward
    of_training = functools.partial(_training_backward, backward)
    whole = differentiable(_NAME, op, _save_for_training, of_training)
    on_autograd_key("batch_norm_training", op, whole)
    inference_backward = batch_norm_inference_backward
    torch.library.register_autograd(
        "cutlass_bn::batch_norm_inference",
        functools.partial(_inference_backward, inference_backward),
        setup_context=_save_for_inference,
    )
    for name, op in (("backward", backward), ("inference_backward", inference_backward)):
        torch.library.register_vmap(f"cutlass_bn::batch_norm_{name}", over_a_batch(op))
    take_any_layout(batch_norm_training, batch_norm_inference, backward, inference_backward)


if library_is_loaded():
    CUDA = _kernels(
        batch_norm_training,
        batch_norm_inference,
        batch_norm_backward,
        batch_norm_inference_backward,
    )
    _register()
