"""The ops behind `functional.linear_batch_norm` on CUDA: entries, fake implementations, autograd formulas.

Schemas and kernels are in csrc/ops. With u = input weight^T [M, N] (before bias and scale), z = scale * (u + bias), and
y = activation(BatchNorm1d(z)): `stats` computes u and the statistics of a batch and updates the running buffers,
`transform` makes y of them and carries the gradient of the whole layer, and `inference` does everything at once from
running statistics.

The backward is composed of ATen operations, in float32 where the input is narrower. A backward that is itself
differentiated (create_graph) goes through `cutlass_bn.reference` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library, reference

ACTIVATION_CODES: dict[str | None, int] = {None: 0, "relu": 1, "gelu": 2, "silu": 3}  # csrc/common/activation.h
_ACTIVATIONS = tuple(ACTIVATION_CODES)
_ACTIVATION_BACKWARDS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda grad, v: grad,
    lambda grad, v: torch.ops.aten.threshold_backward(grad, v, 0.0),
    lambda grad, v: torch.ops.aten.gelu_backward(grad, v),
    lambda grad, v: torch.ops.aten.silu_backward(grad, v),
)


if _library.library_is_loaded():
    _ops = torch.ops.cutlass_bn
    # -> u [M, N] in input's dtype, rows padded to 16 bytes; stats float32 [3, N]: mean of u, its remainder, invstd.
    # Updates running_mean, running_var and num_batches_tracked in place. Not differentiable: takes detached tensors.
    stats = _ops.linear_batch_norm_stats.default
    # -> y [M, N] of `dtype` (input's or float32). Differentiable in the first six, to which u and stats belong.
    transform = _ops.linear_batch_norm_transform.default
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
    m, n = input.size(0), weight.size(0)
    vector = 16 // input.element_size()
    u = input.new_empty_strided((m, n), ((n + vector - 1) // vector * vector, 1))
    return u, input.new_empty((3, n), dtype=torch.float32)


def _fake_transform(input: Tensor, weight: Tensor, *others: Any) -> Tensor:
    _check_operands(input, weight)
    return input.new_empty((input.size(0), weight.size(0)), dtype=others[-1])


def _fake_inference(input: Tensor, weight: Tensor, *others: Any) -> Tensor:
    _check_operands(input, weight)
    return input.new_empty((input.size(0), weight.size(0)), dtype=others[-2])


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


def _or(vector: Tensor | None, absent: float) -> Tensor | float:
    return absent if vector is None else vector.float()


def _gradients(
    grad: Tensor,
    layer: _Layer,
    needs: _Needs,
    activation: int,
    unscaled: Tensor,
    normalised: Tensor,
    invstd: Tensor,
    of_batch: bool,
) -> list[Tensor | None]:
    """The gradients of y = activation(normalised * gamma + beta), where normalised = (z - mean) * invstd.

    All float32 [M, N] or [N]. `unscaled` is dz/dscale: u + bias, from which a batch may subtract its mean. `of_batch`:
    mean and invstd depend on z, which takes the mean of dz and its part along `normalised` away; the bias then has no
    effect on y.
    """
    gamma = _or(layer.gamma, 1.0)
    dv = _ACTIVATION_BACKWARDS[activation](grad.float(), normalised * gamma + _or(layer.beta, 0.0))
    dbeta = dv.sum(0) if of_batch or needs.beta else None
    dgamma = (dv * normalised).sum(0) if of_batch or needs.gamma else None
    dz = dv
    if of_batch and dbeta is not None and dgamma is not None:
        rows = max(grad.size(0), 1)
        dz = dv - dbeta / rows - normalised * (dgamma / rows)
    dz = dz * (gamma * invstd)
    du = (dz * _or(layer.scale, 1.0)).to(layer.input.dtype)

    def cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
        return None if gradient is None or like is None else gradient.to(like.dtype)

    dbias = dscale = None
    if needs.bias and layer.bias is not None:
        dbias = torch.zeros_like(layer.bias) if of_batch else (dz * _or(layer.scale, 1.0)).sum(0)
    if needs.scale:
        dscale = (dz * unscaled).sum(0)
    return [
        du @ layer.weight if needs.input else None,
        du.t() @ layer.input if needs.weight else None,
        cast(dbias, layer.bias),
        cast(dscale, layer.scale),
        cast(dgamma, layer.gamma) if needs.gamma else None,
        cast(dbeta, layer.beta) if needs.beta else None,
    ]


def _differentiable_gradients(y: Tensor, grad: Tensor, layer: _Layer, needs: _Needs) -> list[Tensor | None]:
    wanted = [tensor for tensor, need in zip(layer, needs, strict=True) if need and tensor is not None]
    found = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype), create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needs]


def _setup_transform(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # All of them: the backward's own backward needs input and weight even where the first one doesn't.
    ctx.save_for_backward(*inputs[:8])
    ctx.activation = inputs[8]


def _transform_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, u, batch = ctx.saved_tensors
    layer, needs = _Layer(*tensors), _Needs(*ctx.needs_input_grad[:6])
    if torch.is_grad_enabled():
        y = _transform_again(layer, batch[2], ctx.activation)
        return (*_differentiable_gradients(y, grad, layer, needs), None, None, None, None)
    mean, remainder, invstd = batch
    centred = (u.float() - mean) - remainder
    normalised = centred * (invstd * _or(layer.scale, 1.0))
    grads = _gradients(grad, layer, needs, ctx.activation, centred, normalised, invstd, of_batch=True)
    return (*grads, None, None, None, None)


def _transform_again(layer: _Layer, invstd: Tensor, activation: int) -> Tensor:
    """The training forward in differentiable operations, with the eps that invstd was made with."""
    with torch.no_grad():
        z = (layer.input @ layer.weight.t()).double()
        z = z if layer.scale is None else z * layer.scale.double()
        eps = invstd.double() ** -2 - z.var(0, correction=0)
    x, weight, bias, scale, gamma, beta = layer
    return reference.linear_batch_norm(
        x, weight, bias, scale, None, None, None, gamma, beta, True, 0.0, eps, _ACTIVATIONS[activation]
    )


def _setup_inference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, scale, running_mean, running_var, gamma, beta, eps, activation, _, _ = inputs
    # The buffers may change before the backward runs (another training step, a broadcast between processes).
    buffers = running_mean.clone(), running_var.clone()
    ctx.save_for_backward(input, weight, bias, scale, gamma, beta, *buffers)
    ctx.eps, ctx.activation = eps, activation


def _inference_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, running_mean, running_var = ctx.saved_tensors
    needed = ctx.needs_input_grad
    layer, needs = _Layer(*tensors), _Needs(*needed[:4], *needed[6:8])
    if torch.is_grad_enabled():
        x, weight, bias, scale, gamma, beta = layer
        y = reference.linear_batch_norm(
            x, weight, bias, scale, running_mean, running_var, None, gamma, beta, False, 0.0, ctx.eps,
            _ACTIVATIONS[ctx.activation],
        )  # fmt: skip
        grads = _differentiable_gradients(y, grad, layer, needs)
    else:
        u = (layer.input @ layer.weight.t()).float()
        b, s = _or(layer.bias, 0.0), _or(layer.scale, 1.0)
        invstd = torch.rsqrt(running_var.float() + ctx.eps)
        normalised = (s * u + (s * b - running_mean.float())) * invstd
        grads = _gradients(grad, layer, needs, ctx.activation, u + b, normalised, invstd, of_batch=False)
    return (*grads[:4], None, None, *grads[4:], None, None, None, None)


def _register() -> None:
    for name, fake in (("stats", _fake_stats), ("transform", _fake_transform), ("inference", _fake_inference)):
        torch.library.register_fake(f"cutlass_bn::linear_batch_norm_{name}", fake)
    torch.library.register_autograd(
        "cutlass_bn::linear_batch_norm_transform", _transform_backward, setup_context=_setup_transform
    )
    torch.library.register_autograd(
        "cutlass_bn::linear_batch_norm_inference", _inference_backward, setup_context=_setup_inference
    )


if _library.library_is_loaded():
    _register()
