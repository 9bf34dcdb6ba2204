"""The products of float32 matrices: how they are made, the ops that they are made of, their formulas.

`split_matmul` and `transpose_fp32` are what float32 products of a Hopper GPU are made of in a
backward; `split_fp32` is the first step of the former, for tests and measurements. Schemas and
kernels are in csrc/ops.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from .. import _library, reference
from .batch_norm import over_a_batch

# How float32 products are made (csrc/linear_bn/policy.h): as torch.mm does, in TF32, or of three fp16 products.
FP32_PRODUCTS = {"ieee": 0, "tf32": 1, "split": 2}
# Where split_matmul is the faster one: M, N and K of at least the first, M * N of the second, M * N * K of the third.
_SPLIT_SIZES = 512, 2**19, 2**28
# Where TF32 products gain by a transpose: M * K * N of at least the first, and M * N of the second where k is adjacent
# in neither operand; M and M * N of the others where it is in a.
_TRANSPOSE_PRODUCTS, _TRANSPOSE_OUTPUTS = 2**31, 2**20
_TRANSPOSE_ROWS, _TRANSPOSE_ROW_OUTPUTS = 8192, 2**23

if _library.library_is_loaded():
    _ops = torch.ops.cutlass_bn
    # -> fp16 planes [2, rows, k rounded up to 8] (high and low halves), int32 exponents and census [rows], of matrix
    # or its transpose (csrc/linear_bn/split/split.h).
    split_fp32 = _ops.split_fp32.default
    # -> a @ b of float32 [M, K] and [K, N], each dense in rows or columns, always by the split GEMM; rows padded to 16
    # bytes. Differentiable.
    split_matmul = _ops.split_matmul.default
    # -> float32 [M, N] with dense rows as [N, M], rows padded to 16 bytes. Not differentiable.
    transpose_fp32 = _ops.transpose_fp32.default


def empty_padded(like: Tensor, m: int, n: int) -> Tensor:
    """[m, n] of like's dtype, in rows of whole 16-byte vectors."""
    vector = 16 // like.element_size()
    return like.new_empty_strided((m, n), ((n + vector - 1) // vector * vector, 1))


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
    return empty_padded(a, a.size(0), b.size(1))


def _fake_transpose_fp32(matrix: Tensor) -> Tensor:
    _check_float32_matrix(matrix, "matrix")
    return empty_padded(matrix, matrix.size(1), matrix.size(0))


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


def _unit_strided(matrix: Tensor) -> Tensor:
    """matrix, or a copy where neither its rows nor its columns are dense (those of an expanded tensor overlap)."""
    (rows, columns), (row_stride, column_stride) = matrix.shape, matrix.stride()
    if (column_stride == 1 and row_stride >= columns) or (row_stride == 1 and column_stride >= rows):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def matmul(a: Tensor, b: Tensor, fp32_products: int) -> Tensor:
    """a @ b, as precise as the products of the forward."""
    if a.dtype == torch.float32 and _is_hopper(a.device):
        if fp32_products == FP32_PRODUCTS["split"] and _is_large(a.size(0), a.size(1), b.size(1)):
            return split_matmul(_unit_strided(a), _unit_strided(b)).contiguous()
        if fp32_products == FP32_PRODUCTS["tf32"]:
            return torch.mm(*_with_k_adjacent(a, b))
    return a @ b


def _with_k_adjacent(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b, one of them transposed in memory where cuBLAS's TF32 product gains more by it than that costs.

    Tensor cores take TF32 with k adjacent in both operands alone. Where it is in neither, mending one
    gains the most, and the smaller one costs less; where it is in a, b has to be small beside the
    product (docs/notes/2026-11-29-tf32-transpose.md).
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


# An op, for the sake of flop counters: they don't look inside, and what a backward makes again is no
# work of the layer.
torch.library.define(
    "cutlass_bn::product_again",
    "(Tensor input, Tensor weight, Tensor? bias, int fp32_products) -> Tensor",
)
product_again = torch.ops.cutlass_bn.product_again.default


@torch.library.impl("cutlass_bn::product_again", "CompositeExplicitAutograd")
def _product_again(input: Tensor, weight: Tensor, bias: Tensor | None, fp32_products: int) -> Tensor:
    """What the inference rounded: the product, in half precision with the bias."""
    if input.dtype in reference.HALVES:
        return F.linear(input, weight, bias)
    return matmul(input, weight.t(), fp32_products)


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
        ("split_fp32", _fake_split_fp32),
        ("split_matmul", _fake_split_matmul),
        ("transpose_fp32", _fake_transpose_fp32),
    ):
        torch.library.register_fake(f"cutlass_bn::{name}", fake)
    torch.library.register_autograd(
        "cutlass_bn::split_matmul", _split_matmul_backward, setup_context=_setup_split_matmul
    )
    for name, op in (("split_matmul", split_matmul), ("transpose_fp32", transpose_fp32)):
        torch.library.register_vmap(f"cutlass_bn::{name}", over_a_batch(op))


if _library.library_is_loaded():
    _register()
