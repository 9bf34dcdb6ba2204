"""The Linear + BatchNorm1d ops of csrc/ops/linear_batch_norm*.cpp: fakes and gradients.

`linear_batch_norm_training` updates running buffers and is differentiable through y. Its gradient
is an op itself; where a graph of it is asked for (create_graph) the definition in plain PyTorch
takes its place.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library, cpu, reference
from .._activations import ACTIVATIONS, NAMES
from ._autograd import (
    Kernels,
    Op,
    Pass,
    differentiable,
    dtype_if,
    gradients_by_formula,
    on_autograd_key,
    over_a_batch,
    take_any_layout,
    takes_formula,
    wide_dtype,
)
from .product import matmul, product_again

if _library.library_is_loaded():
    _ops = torch.ops.cutlass_bn
    training = _ops.linear_batch_norm_training.default
    backward = _ops.linear_batch_norm_backward.default
    inference = _ops.linear_batch_norm_inference.default
    plan = _ops.linear_batch_norm_plan.default


def _check_operands(input: Tensor, weight: Tensor) -> None:
    torch._check(
        input.dim() == 2 and weight.dim() == 2, lambda: "input, weight: expected 2 dimensions"
    )
    expected, shape = [weight.size(0), input.size(1)], list(weight.shape)
    torch._check(
        weight.size(1) == input.size(1), lambda: f"weight: expected shape {expected}, got {shape}"
    )
    torch._check(
        weight.dtype == input.dtype,
        lambda: f"weight: expected {input.dtype} like input, got {weight.dtype}",
    )


def _fake_training(input: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_operands(input, weight)
    m, n, vector = input.size(0), weight.size(0), 16 // input.element_size()
    u = input.new_empty_strided((m, n), ((n + vector - 1) // vector * vector, 1))
    return input.new_empty((m, n), dtype=others[-2]), u, u.new_empty((3, n), dtype=torch.float32)


def _fake_inference(input: Tensor, weight: Tensor, *others: Any) -> Tensor:
    _check_operands(input, weight)
    return input.new_empty((input.size(0), weight.size(0)), dtype=others[-2])


def _fake_backward(
    grad: Tensor, input: Tensor, weight: Tensor, u: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    *_, input_grad, weight_grad, bias_grad, scale_grad, gamma_grad, beta_grad = others
    shape, expected = list(grad.shape), list(u.shape)
    torch._check(shape == expected, lambda: f"grad: expected shape {expected}, got {shape}")
    vectors = (
        u.new_empty((0 if dtype is None else u.size(1),), dtype=dtype or torch.float32)
        for dtype in (bias_grad, scale_grad, gamma_grad, beta_grad)
    )
    matrices = (
        tensor.new_empty(tensor.shape) if asked else u.new_empty((0,))
        for tensor, asked in ((input, input_grad), (weight, weight_grad))
    )
    return *matrices, *vectors


class _Layer(NamedTuple):
    """What a gradient can be asked for."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None


class _Needs(NamedTuple):
    input: bool
    weight: bool
    bias: bool
    scale: bool
    gamma: bool
    beta: bool


# Both ops take input, weight, bias, scale first, and gamma, beta after the buffers.
_GAMMA_IN_TRAINING, _GAMMA_IN_INFERENCE = 7, 6


def _at(inputs: tuple[Any, ...], gamma: int) -> tuple[Any, ...]:
    return *inputs[:4], *inputs[gamma : gamma + 2]


def _in_place(gradients: Any, gamma: int, count: int) -> tuple[Tensor | None, ...]:
    """The gradients of a layer where the op's arguments are."""
    *of_matrix, dgamma, dbeta = gradients
    nothing = (None,) * (gamma - 4)
    return *of_matrix, *nothing, dgamma, dbeta, *(None,) * (count - gamma - 2)


def _by_definition(
    layer: _Layer,
    needs: _Needs,
    grad: Tensor,
    statistics: tuple[Tensor | None, Tensor | None],
    eps: float,
    activation: int,
) -> list[Tensor | None]:
    """The gradients, differentiable."""
    of_batch, name = statistics[0] is None, NAMES[activation]

    def y(*tensors: Any) -> Tensor:
        x, weight, bias, scale, gamma, beta = tensors
        return reference.linear_batch_norm(
            x, weight, bias, scale, *statistics, None, gamma, beta, of_batch, 0.0, eps, name
        )

    return gradients_by_formula(y, layer, needs, grad)


def _save_for_training(
    ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    # All of them: the backward's own backward needs those, too, that the first one doesn't.
    ctx.save_for_backward(*_at(inputs, _GAMMA_IN_TRAINING), *outputs[1:])
    _, ctx.eps, ctx.activation, _, ctx.fp32_products = inputs[9:]


def _training_backward(op: Op, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, u, stats = ctx.saved_tensors
    layer = _Layer(*tensors)
    needs = _Needs(*_at(ctx.needs_input_grad, _GAMMA_IN_TRAINING))
    if takes_formula(grad):
        gradients = _by_definition(layer, needs, grad, (None, None), ctx.eps, ctx.activation)
    else:
        x, weight, bias, scale, gamma, beta = layer
        gradients = op(
            grad, x, weight, u, stats, scale, gamma, beta, ctx.eps, ctx.activation,
            ctx.fp32_products, needs.input, needs.weight, dtype_if(needs.bias, bias),
            dtype_if(needs.scale, scale), dtype_if(needs.gamma, gamma), dtype_if(needs.beta, beta),
        )  # fmt: skip
        gradients = [g if need else None for g, need in zip(gradients, needs, strict=True)]
    return _in_place(gradients, _GAMMA_IN_TRAINING, 14)


def _save_for_inference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # The buffers may change before the backward runs (a training step, a broadcast of DDP).
    buffers = (buffer.clone() for buffer in inputs[4:6])
    ctx.save_for_backward(*_at(inputs, _GAMMA_IN_INFERENCE), *buffers)
    ctx.eps, ctx.activation, _, ctx.fp32_products = inputs[8:]


def _inference_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, mean, var = ctx.saved_tensors
    layer = _Layer(*tensors)
    needs = _Needs(*_at(ctx.needs_input_grad, _GAMMA_IN_INFERENCE))
    if torch.is_grad_enabled():
        gradients = _by_definition(layer, needs, grad, (mean, var), ctx.eps, ctx.activation)
    else:
        gradients = _inference_gradients(ctx, layer, needs, grad, mean, var)
    return _in_place(gradients, _GAMMA_IN_INFERENCE, 12)


def _inference_gradients(
    ctx: Any, layer: _Layer, needs: _Needs, grad: Tensor, mean: Tensor, var: Tensor
) -> list[Tensor | None]:
    """In float32, or float64 where input is, from the product made again."""
    wide = wide_dtype(layer.input)
    bias, scale = _or(layer.bias, 0.0, wide), _or(layer.scale, 1.0, wide)
    if layer.input.dtype in reference.HALVES:
        bias = 0.0  # it is in what was rounded
    u = product_again(*layer[:3], ctx.fp32_products).to(wide)
    invstd, gamma = torch.rsqrt(var.to(wide) + ctx.eps), _or(layer.gamma, 1.0, wide)
    normalised = (scale * u + (scale * bias - mean.to(wide))) * invstd
    v = normalised * gamma + _or(layer.beta, 0.0, wide)
    dv = ACTIVATIONS[NAMES[ctx.activation]].backward(grad.to(wide), v)
    dz = dv * (gamma * invstd)
    du = (dz * scale).to(layer.input.dtype)

    def total(gradient: Tensor, vector: Tensor | None) -> Tensor | None:
        return None if vector is None else gradient.sum(0).to(vector.dtype)

    # weight's first: it takes the larger workspace, beside which input's gradient needn't stand.
    dweight = matmul(du.t(), layer.input, ctx.fp32_products) if needs.weight else None
    return [
        matmul(du, layer.weight, ctx.fp32_products) if needs.input else None,
        dweight,
        total(dz * scale, layer.bias) if needs.bias else None,
        total(dz * (u + bias), layer.scale) if needs.scale else None,
        total(dv * normalised, layer.gamma) if needs.gamma else None,
        total(dv, layer.beta) if needs.beta else None,
    ]


def _or(vector: Tensor | None, absent: float, dtype: torch.dtype) -> Tensor | float:
    return absent if vector is None else vector.to(dtype)


_NAME = "LinearBatchNorm"  # in autograd's graph


def _kernels(training: Op, inference: Op, backward: Op) -> Kernels:
    of_training = functools.partial(_training_backward, backward)
    return Kernels(
        Pass(
            training,
            differentiable(_NAME, training, _save_for_training, of_training, first=True),
        ),
        Pass(inference, differentiable(_NAME, inference, _save_for_inference, _inference_backward)),
    )


CPU = _kernels(
    cpu.linear_batch_norm_training, cpu.linear_batch_norm_inference, cpu.linear_batch_norm_backward
)


def _register() -> None:
    for name, fake in (
        ("training", _fake_training),
        ("inference", _fake_inference),
        ("backward", _fake_backward),
    ):
        torch.library.register_fake(f"cutlass_bn::linear_batch_norm_{name}", fake)
    of_training = functools.partial(_training_backward, backward)
    whole = differentiable(_NAME, training, _save_for_training, of_training)
    on_autograd_key("linear_batch_norm_training", training, whole)
    torch.library.register_autograd(
        "cutlass_bn::linear_batch_norm_inference",
        _inference_backward,
        setup_context=_save_for_inference,
    )
    torch.library.register_vmap("cutlass_bn::linear_batch_norm_backward", over_a_batch(backward))
    take_any_layout(training, inference, backward)


if _library.library_is_loaded():
    CUDA = _kernels(training, inference, backward)
    _register()
