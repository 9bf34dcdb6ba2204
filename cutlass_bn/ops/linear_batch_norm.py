"""The ops behind `functional.linear_batch_norm`: entries, fake implementations, autograd formulas.

Schemas and kernels are in csrc/ops. With u = input weight^T [M, N], z = scale * (u + bias), and
y = activation(BatchNorm1d(z)): `stats` computes u and the statistics of a batch and updates the running buffers,
`transform` makes y of them and carries the gradient of the whole layer, and `inference` does everything at once from
running statistics. In float16 and bfloat16 u is rounded with the bias in it, and z = scale * u.

The backward of training is `backward`, from y to u and the vectors, and two matrix products; that of eval is made of
ATen operations, in float32 where the input is narrower. A backward that is itself differentiated (create_graph) goes
through `cutlass_bn.reference` instead.

`cutlass_bn.cpu` has the same functions for CPU tensors; `CPU` and `CUDA` are what eager calls take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library, cpu, reference
from .._activations import ACTIVATIONS, NAMES
from .batch_norm import over_a_batch, takes_formula, wide_dtype, without_wrapper
from .fp32_products import empty_padded, matmul, product_again

if _library.library_is_loaded():
    _ops = torch.ops.cutlass_bn
    # -> u [M, N] in input's dtype, rows padded to 16 bytes; stats float32 [3, N]: mean of u, its remainder, invstd.
    # Updates running_mean, running_var and num_batches_tracked in place. Not differentiable: takes detached tensors.
    stats = _ops.linear_batch_norm_stats.default
    # -> y [M, N] of `dtype` (input's or float32). Differentiable in the first six, to which u and stats belong.
    transform = _ops.linear_batch_norm_transform.default
    # -> gradients of u, scale, gamma and beta for that of transform's output; empty where not asked for.
    backward = _ops.linear_batch_norm_backward.default
    # -> y [M, N] of `dtype` (input's or float32) from running statistics. Differentiable in all but those.
    inference = _ops.linear_batch_norm_inference.default
    # -> which kernels such a call takes: "fused: <tile>" or "portable: <reason>".
    plan = _ops.linear_batch_norm_plan.default


def _check_operands(input: Tensor, weight: Tensor) -> None:
    torch._check(input.dim() == 2, lambda: f"input: expected 2 dimensions, got shape {list(input.shape)}")
    torch._check(weight.dim() == 2, lambda: f"weight: expected 2 dimensions, got shape {list(weight.shape)}")
    torch._check(
        weight.size(1) == input.size(1),
        lambda: f"weight: expected shape [{weight.size(0)}, {input.size(1)}], got {list(weight.shape)}",
    )
    torch._check(weight.dtype == input.dtype, lambda: f"weight: expected {input.dtype} like input, got {weight.dtype}")


def _fake_stats(input: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    _check_operands(input, weight)
    u = empty_padded(input, input.size(0), weight.size(0))
    return u, input.new_empty((3, weight.size(0)), dtype=torch.float32)


def _fake_output(input: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """Of transform and of inference, which end in the dtype and the code of the float32 products."""
    _check_operands(input, weight)
    return input.new_empty((input.size(0), weight.size(0)), dtype=others[-2])


def _fake_backward(grad: Tensor, u: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, u_grad, scale_grad, gamma_grad, beta_grad = others
    torch._check(u.dim() == 2, lambda: f"u: expected 2 dimensions, got shape {list(u.shape)}")
    torch._check(grad.shape == u.shape, lambda: f"grad: expected shape {list(u.shape)}, got {list(grad.shape)}")
    vectors = (
        u.new_empty((0 if dtype is None else u.size(1),), dtype=dtype or torch.float32)
        for dtype in (scale_grad, gamma_grad, beta_grad)
    )
    return empty_padded(u, *u.shape) if u_grad else u.new_empty((0,)), *vectors


class Kernels(NamedTuple):
    """What eager calls take of one device's implementation. The first three want no gradient recorded."""

    stats: Callable[..., tuple[Tensor, Tensor]]
    transform: Callable[..., Tensor]
    inference: Callable[..., Tensor]
    differentiable_transform: Callable[..., Tensor]
    differentiable_inference: Callable[..., Tensor]


class _Layer(NamedTuple):
    """What a gradient can be asked for, in the order of the schemas' arguments."""

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


def _or(vector: Tensor | None, absent: float, dtype: torch.dtype) -> Tensor | float:
    return absent if vector is None else vector.to(dtype)


def _inference_gradients(
    grad: Tensor,
    layer: _Layer,
    needs: _Needs,
    activation: int,
    fp32_products: int,
    unscaled: Tensor,
    normalised: Tensor,
    invstd: Tensor,
) -> list[Tensor | None]:
    """The gradients of y = activation(normalised * gamma + beta), where normalised = (z - mean) * invstd.

    All float32 [M, N] or [N], or float64 where input is. `unscaled` is dz/dscale: u + bias.
    """
    wide = normalised.dtype
    gamma, scale = _or(layer.gamma, 1.0, wide), _or(layer.scale, 1.0, wide)
    dv = ACTIVATIONS[NAMES[activation]].backward(grad.to(wide), normalised * gamma + _or(layer.beta, 0.0, wide))
    dz = dv * (gamma * invstd)
    du = (dz * scale).to(layer.input.dtype)

    def total(gradient: Tensor, like: Tensor | None) -> Tensor | None:
        return None if like is None else gradient.sum(0).to(like.dtype)

    return [
        *_products(du, layer, needs, fp32_products),
        total(dz * scale, layer.bias) if needs.bias else None,
        total(dz * unscaled, layer.scale) if needs.scale else None,
        total(dv * normalised, layer.gamma) if needs.gamma else None,
        total(dv, layer.beta) if needs.beta else None,
    ]


def _products(du: Tensor, layer: _Layer, needs: _Needs, fp32_products: int) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and weight."""
    # weight's first: it takes the larger workspace, beside which input's gradient needn't stand.
    dweight = matmul(du.t(), layer.input, fp32_products) if needs.weight else None
    return matmul(du, layer.weight, fp32_products) if needs.input else None, dweight


def _differentiable_gradients(y: Tensor, grad: Tensor, layer: _Layer, needs: _Needs) -> list[Tensor | None]:
    wanted = [tensor for tensor, need in zip(layer, needs, strict=True) if need and tensor is not None]
    found = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype), create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needs]


def _setup_transform(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # All of them: the backward's own backward needs input and weight even where the first one doesn't.
    ctx.save_for_backward(*inputs[:8])
    ctx.eps, ctx.activation, _, ctx.fp32_products = inputs[8:]


def _transform_backward(backward: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, u, stats = ctx.saved_tensors
    layer, needs = _Layer(*tensors), _Needs(*ctx.needs_input_grad[:6])
    _, _, bias, scale, gamma, beta = layer
    if takes_formula(grad):
        with torch.enable_grad():
            y = reference.linear_batch_norm(
                layer.input, layer.weight, bias, scale, None, None, None, gamma, beta, True, 0.0, ctx.eps,
                NAMES[ctx.activation],
            )  # fmt: skip
            return (*_differentiable_gradients(y, grad, layer, needs), *[None] * 6)
    needs_du = needs.input or needs.weight
    du, *vectors = backward(
        grad, u, stats, scale, gamma, beta, ctx.eps, ctx.activation, needs_du,
        *(
            vector.dtype if need and vector is not None else None
            for vector, need in zip(layer[3:], needs[3:], strict=True)
        ),
    )  # fmt: skip
    products = _products(du, layer, needs, ctx.fp32_products)
    dbias = torch.zeros_like(bias) if needs.bias and bias is not None else None  # the mean takes the bias away again
    vectors = [vector if need else None for vector, need in zip(vectors, needs[3:], strict=True)]
    return (*products, dbias, *vectors, *[None] * 6)


def _setup_inference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, scale, running_mean, running_var, gamma, beta, eps, activation, _, fp32_products = inputs
    # The buffers may change before the backward runs (another training step, a broadcast between processes).
    buffers = running_mean.clone(), running_var.clone()
    ctx.save_for_backward(input, weight, bias, scale, gamma, beta, *buffers)
    ctx.eps, ctx.activation, ctx.fp32_products = eps, activation, fp32_products


def _inference_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, running_mean, running_var = ctx.saved_tensors
    needed = ctx.needs_input_grad
    layer, needs = _Layer(*tensors), _Needs(*needed[:4], *needed[6:8])
    if torch.is_grad_enabled():
        x, weight, bias, scale, gamma, beta = layer
        y = reference.linear_batch_norm(
            x, weight, bias, scale, running_mean, running_var, None, gamma, beta, False, 0.0, ctx.eps,
            NAMES[ctx.activation],
        )  # fmt: skip
        grads = _differentiable_gradients(y, grad, layer, needs)
    else:
        wide = wide_dtype(layer.input)
        b, s = _or(layer.bias, 0.0, wide), _or(layer.scale, 1.0, wide)
        if layer.input.dtype in reference.HALVES:
            b = 0.0  # it is in what was rounded
        u = product_again(*layer[:3], ctx.fp32_products).to(wide)
        invstd = torch.rsqrt(running_var.to(wide) + ctx.eps)
        normalised = (s * u + (s * b - running_mean.to(wide))) * invstd
        codes = ctx.activation, ctx.fp32_products
        grads = _inference_gradients(grad, layer, needs, *codes, u + b, normalised, invstd)
    return (*grads[:4], None, None, *grads[4:], *[None] * 4)


def _kernels(
    stats: Callable[..., tuple[Tensor, Tensor]],
    transform: Callable[..., Tensor],
    backward: Callable[..., Any],
    inference: Callable[..., Tensor],
) -> Kernels:
    of_transform = functools.partial(_transform_backward, backward)
    return Kernels(
        stats,
        transform,
        inference,
        without_wrapper("LinearBatchNorm", transform, _setup_transform, of_transform),
        without_wrapper("LinearBatchNorm", inference, _setup_inference, _inference_backward),
    )


CPU = _kernels(
    cpu.linear_batch_norm_stats,
    cpu.linear_batch_norm_transform,
    cpu.linear_batch_norm_backward,
    cpu.linear_batch_norm_inference,
)


def _register() -> None:
    for name, fake in (
        ("linear_batch_norm_stats", _fake_stats),
        ("linear_batch_norm_transform", _fake_output),
        ("linear_batch_norm_backward", _fake_backward),
        ("linear_batch_norm_inference", _fake_output),
    ):
        torch.library.register_fake(f"cutlass_bn::{name}", fake)
    for name, formula, setup in (
        ("linear_batch_norm_transform", functools.partial(_transform_backward, backward), _setup_transform),
        ("linear_batch_norm_inference", _inference_backward, _setup_inference),
    ):
        torch.library.register_autograd(f"cutlass_bn::{name}", formula, setup_context=setup)
    for name, op in (("linear_batch_norm_backward", backward),):
        torch.library.register_vmap(f"cutlass_bn::{name}", over_a_batch(op))


if _library.library_is_loaded():
    CUDA = _kernels(stats, transform, backward, inference)
    differentiable_transform, differentiable_inference = CUDA.differentiable_transform, CUDA.differentiable_inference
    _register()
