"""The ops behind `functional.linear_batch_norm` on CUDA: entries, fake implementations, autograd formulas.

Schemas and kernels are in csrc/ops. With u = input weight^T [M, N] (before bias and scale), z = scale * (u + bias), and
y = activation(BatchNorm1d(z)): `stats` computes u and the statistics of a batch and updates the running buffers,
`transform` makes y of them and carries the gradient of the whole layer, and `inference` does everything at once from
running statistics. `split_matmul` and `transpose_fp32` are what float32 products of a Hopper GPU are made of in a
backward; `split_fp32` is the first step of the former, for tests and measurements.

The backward of training is `backward`, from y to u and the vectors, and two matrix products; that of eval is made of
ATen operations, in float32 where the input is narrower. A backward that is itself differentiated (create_graph) goes
through `cutlass_bn.reference` instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .. import _library, reference
from .batch_norm import over_a_batch, without_wrapper

ACTIVATION_CODES: dict[str | None, int] = {None: 0, "relu": 1, "gelu": 2, "silu": 3}  # csrc/common/activation.h
_ACTIVATIONS = tuple(ACTIVATION_CODES)
# How float32 products are made (csrc/linear_bn/dispatch.h): as torch.mm does, in TF32, or of three fp16 products.
FP32_PRODUCTS = {"ieee": 0, "tf32": 1, "split": 2}
# Where split_matmul is the faster one: M, N and K of at least the first, M * N of the second, M * N * K of the third.
_SPLIT_SIZES = 512, 2**19, 2**28
# Where TF32 products gain by a transpose: M * K * N of at least the first, and M * N of the second where k is adjacent
# in neither operand; M and M * N of the others where it is in a.
_TRANSPOSE_PRODUCTS, _TRANSPOSE_OUTPUTS = 2**31, 2**20
_TRANSPOSE_ROWS, _TRANSPOSE_ROW_OUTPUTS = 8192, 2**23
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
    # -> gradients of u, scale, gamma and beta for that of transform's output; empty where not asked for.
    backward = _ops.linear_batch_norm_backward.default
    # -> y [M, N] of `dtype` (input's or float32) from running statistics. Differentiable in all but those.
    inference = _ops.linear_batch_norm_inference.default
    # -> which kernels such a call takes: "fused: <tile>" or "portable: <reason>".
    plan = _ops.linear_batch_norm_plan.default
    # -> fp16 planes [2, rows, k rounded up to 8] (high and low halves), int32 exponents and census [rows], of matrix
    # or its transpose (csrc/linear_bn/split/split.h).
    split_fp32 = _ops.split_fp32.default
    # -> a @ b of float32 [M, K] and [K, N], each dense in rows or columns, always by the split GEMM; rows padded to 16
    # bytes. Differentiable.
    split_matmul = _ops.split_matmul.default
    # -> float32 [M, N] with dense rows as [N, M], rows padded to 16 bytes. Not differentiable.
    transpose_fp32 = _ops.transpose_fp32.default


def _check_operands(input: Tensor, weight: Tensor) -> None:
    torch._check(input.dim() == 2, lambda: f"input: expected 2 dimensions, got shape {list(input.shape)}")
    torch._check(weight.dim() == 2, lambda: f"weight: expected 2 dimensions, got shape {list(weight.shape)}")
    torch._check(
        weight.size(1) == input.size(1),
        lambda: f"weight: expected shape [{weight.size(0)}, {input.size(1)}], got {list(weight.shape)}",
    )
    torch._check(weight.dtype == input.dtype, lambda: f"weight: expected {input.dtype} like input, got {weight.dtype}")


def _empty_padded(like: Tensor, m: int, n: int) -> Tensor:
    """[m, n] of like's dtype, in rows of whole 16-byte vectors."""
    vector = 16 // like.element_size()
    return like.new_empty_strided((m, n), ((n + vector - 1) // vector * vector, 1))


def _fake_stats(input: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    _check_operands(input, weight)
    u = _empty_padded(input, input.size(0), weight.size(0))
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
    return _empty_padded(u, *u.shape) if u_grad else u.new_empty((0,)), *vectors


def _check_float32_matrix(matrix: Tensor, name: str) -> None:
    torch._check(matrix.dim() == 2, lambda: f"{name}: expected 2 dimensions, got shape {list(matrix.shape)}")
    torch._check(matrix.dtype == torch.float32, lambda: f"{name}: expected float32, got {matrix.dtype}")


def _fake_split_fp32(matrix: Tensor, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    _check_float32_matrix(matrix, "matrix")
    k, rows = matrix.shape if transposed else matrix.shape[::-1]
    planes = matrix.new_empty((2, rows, (k + 7) // 8 * 8), dtype=torch.float16)
    exponents, census = (matrix.new_empty((rows,), dtype=torch.int32) for _ in range(2))
    return planes, exponents, census


def _fake_split_matmul(a: Tensor, b: Tensor) -> Tensor:
    _check_float32_matrix(a, "a")
    _check_float32_matrix(b, "b")
    torch._check(a.size(1) == b.size(0), lambda: f"b: expected shape [{a.size(1)}, N], got {list(b.shape)}")
    return _empty_padded(a, a.size(0), b.size(1))


def _fake_transpose_fp32(matrix: Tensor) -> Tensor:
    _check_float32_matrix(matrix, "matrix")
    return _empty_padded(matrix, matrix.size(1), matrix.size(0))


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


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


def _unit_strided(matrix: Tensor) -> Tensor:
    """matrix, or a copy where neither its rows nor its columns are dense (those of an expanded tensor overlap)."""
    (rows, columns), (row_stride, column_stride) = matrix.shape, matrix.stride()
    if (column_stride == 1 and row_stride >= columns) or (row_stride == 1 and column_stride >= rows):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _matmul(a: Tensor, b: Tensor, fp32_products: int) -> Tensor:
    """a @ b, as precise as the products of the forward."""
    if a.dtype == torch.float32 and _is_hopper(a.device):
        if fp32_products == FP32_PRODUCTS["split"] and _is_large(a.size(0), a.size(1), b.size(1)):
            return split_matmul(_unit_strided(a), _unit_strided(b)).contiguous()
        if fp32_products == FP32_PRODUCTS["tf32"]:
            return torch.mm(*_with_k_adjacent(a, b))
    return a @ b


def _with_k_adjacent(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b, one of them transposed in memory where cuBLAS's TF32 product gains more by it than that costs.

    Tensor cores take TF32 with k adjacent in both operands alone. Where it is in neither, mending one gains the most,
    and the smaller one costs less; where it is in a, b has to be small beside the product (docs/performance.md).
    """
    m, k, n = a.size(0), a.size(1), b.size(1)
    if not _are_known(m * k * n >= _TRANSPOSE_PRODUCTS, b.stride(1) == 1):
        return a, b
    if _are_known(a.stride(0) == 1, m * n >= _TRANSPOSE_OUTPUTS):
        return (transpose_fp32(a.t()), b) if _are_known(m < n) else (a, transpose_fp32(b).t())
    if _are_known(a.stride(1) == 1, m * n >= _TRANSPOSE_ROW_OUTPUTS, m >= _TRANSPOSE_ROWS, m >= 2 * k):
        return a, transpose_fp32(b).t()
    return a, b


def _are_known(*conditions: Any) -> bool:
    """Whether all hold. False, too, where a size is not known while a graph is traced."""
    return all(guard_or_false(condition) for condition in conditions)


def _is_large(m: int, k: int, n: int) -> bool:
    size, outputs, products = _SPLIT_SIZES
    return _are_known(m >= size, k >= size, n >= size, m * n >= outputs, m * n * k >= products)


def _or(vector: Tensor | None, absent: float) -> Tensor | float:
    return absent if vector is None else vector.float()


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

    All float32 [M, N] or [N]. `unscaled` is dz/dscale: u + bias.
    """
    gamma, scale = _or(layer.gamma, 1.0), _or(layer.scale, 1.0)
    dv = _ACTIVATION_BACKWARDS[activation](grad.float(), normalised * gamma + _or(layer.beta, 0.0))
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
    dweight = _matmul(du.t(), layer.input, fp32_products) if needs.weight else None
    return _matmul(du, layer.weight, fp32_products) if needs.input else None, dweight


def _differentiable_gradients(y: Tensor, grad: Tensor, layer: _Layer, needs: _Needs) -> list[Tensor | None]:
    wanted = [tensor for tensor, need in zip(layer, needs, strict=True) if need and tensor is not None]
    found = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype), create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needs]


def _setup_transform(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # All of them: the backward's own backward needs input and weight even where the first one doesn't.
    ctx.save_for_backward(*inputs[:8])
    ctx.eps, ctx.activation, _, ctx.fp32_products = inputs[8:]


def _transform_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, u, stats = ctx.saved_tensors
    layer, needs = _Layer(*tensors), _Needs(*ctx.needs_input_grad[:6])
    _, _, bias, scale, gamma, beta = layer
    if torch.is_grad_enabled():
        y = reference.linear_batch_norm(
            layer.input, layer.weight, bias, scale, None, None, None, gamma, beta, True, 0.0, ctx.eps,
            _ACTIVATIONS[ctx.activation],
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
            _ACTIVATIONS[ctx.activation],
        )  # fmt: skip
        grads = _differentiable_gradients(y, grad, layer, needs)
    else:
        u = _matmul(layer.input, layer.weight.t(), ctx.fp32_products).float()
        b, s = _or(layer.bias, 0.0), _or(layer.scale, 1.0)
        invstd = torch.rsqrt(running_var.float() + ctx.eps)
        normalised = (s * u + (s * b - running_mean.float())) * invstd
        codes = ctx.activation, ctx.fp32_products
        grads = _inference_gradients(grad, layer, needs, *codes, u + b, normalised, invstd)
    return (*grads[:4], None, None, *grads[4:], *[None] * 4)


def _setup_split_matmul(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    a, b = inputs
    needs_da, needs_db = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_db else None, b if needs_da else None)


def _split_matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """da = dc b^T, db = a^T dc. Differentiable as it stands."""
    a, b = ctx.saved_tensors
    grad = _unit_strided(grad)
    return None if b is None else split_matmul(grad, b.t()), None if a is None else split_matmul(a.t(), grad)


def _register() -> None:
    for name, fake in (
        ("linear_batch_norm_stats", _fake_stats),
        ("linear_batch_norm_transform", _fake_output),
        ("linear_batch_norm_backward", _fake_backward),
        ("linear_batch_norm_inference", _fake_output),
        ("split_fp32", _fake_split_fp32),
        ("split_matmul", _fake_split_matmul),
        ("transpose_fp32", _fake_transpose_fp32),
    ):
        torch.library.register_fake(f"cutlass_bn::{name}", fake)
    for name, formula, setup in (
        ("linear_batch_norm_transform", _transform_backward, _setup_transform),
        ("linear_batch_norm_inference", _inference_backward, _setup_inference),
        ("split_matmul", _split_matmul_backward, _setup_split_matmul),
    ):
        torch.library.register_autograd(f"cutlass_bn::{name}", formula, setup_context=setup)
    for name, op in (
        ("linear_batch_norm_backward", backward),
        ("split_matmul", split_matmul),
        ("transpose_fp32", transpose_fp32),
    ):
        torch.library.register_vmap(f"cutlass_bn::{name}", over_a_batch(op))


if _library.library_is_loaded():
    _register()
    differentiable_transform = without_wrapper("LinearBatchNorm", transform, _setup_transform, _transform_backward)
    differentiable_inference = without_wrapper("LinearBatchNorm", inference, _setup_inference, _inference_backward)
