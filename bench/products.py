"""The parts of the fp32 products on tensor cores: the split of an operand, and the product in every operand order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cutlass_bn.ops import linear_batch_norm as ops

from .cases import GEMM_LARGE, matmul_precision
from .errors import product_errors, set_error, share, worse_than
from .peers import rotations
from .records import COPY, FAILED, SGEMM, SPLIT, Row
from .timing import interleave, set_time

SUITE = "kernels"
SPLIT_ALONE = "split_fp32"
TF32, FP16 = "torch.mm tf32", "torch.mm fp16"
ONE_EXACT, ALL_EXACT = f"{SPLIT}, one row left to the exact kernel", f"{SPLIT}, all rows left to it"

# An element within 2^-28 of its row's maximum is held to 2^-23 (docs/numerics.md); the rest is room for the oracle.
HELD_TO = 2.0**-22


@dataclass(frozen=True)
class SplitOf:
    """The split of an fp32 matrix [rows, columns] beside a copy of as many bytes: it reads and writes 4 an element."""

    what: str
    rows: int
    columns: int
    transposed: bool = False  # the columns are split, as where they are the reduction's

    @property
    def name(self) -> str:
        return f"{SUITE} split of {self.what} {self.rows}x{self.columns}"

    @torch.no_grad()
    def measure(self, device: torch.device, seconds: float) -> list[Row]:
        size = self.rows * self.columns * torch.float32.itemsize
        inputs = [torch.rand(self.rows, self.columns, device=device) for _ in range(rotations(size, device))]
        calls = {
            SPLIT_ALONE: lambda i: ops.split_fp32(inputs[i % len(inputs)], self.transposed),
            COPY: lambda i: inputs[i % len(inputs)].clone(),
        }
        rows = {name: Row(SUITE, self.name, name, work=2.0 * size, unit="GB/s") for name in calls}
        self._check(inputs[0], rows[SPLIT_ALONE])
        for name, timing in interleave(calls, device, seconds).items():
            set_time(rows[name], timing)
        for row in rows.values():
            row.limit_ms = rows[COPY].ms
        return list(rows.values())

    def _check(self, x: Tensor, row: Row) -> None:
        matrix = (x.t() if self.transposed else x).double()
        planes, exponents, _ = ops.split_fp32(x, self.transposed)
        hi, lo = planes[..., : matrix.shape[1]].double()
        difference = ((hi + lo * 2.0**-12) * torch.exp2(-exponents.double())[:, None]).sub_(matrix).abs_()
        row.max_abs_error = difference.max().item()
        row.relative_error = (difference.square().sum() / matrix.square().sum()).sqrt().item()
        row.componentwise_error = share(difference, matrix.abs_()).item()
        if not row.componentwise_error <= HELD_TO:
            row.status = FAILED
            row.detail = f"an element is held to {row.componentwise_error:.1e}, allowed {HELD_TO:.1e}"


# The products of a layer, from x [M, K], W [N, K] and dz [M, N]: u, dx and dW.
ORDERS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "x W^T": lambda x, w, dz: (x, w.t()),
    "dz W": lambda x, w, dz: (dz, w),
    "dz^T x": lambda x, w, dz: (dz.t(), x),
}


@dataclass(frozen=True)
class Product:
    """One of ORDERS in fp32 by the split GEMM beside cuBLAS; the limit is three fp16 products by cuBLAS."""

    order: str
    shape: tuple[int, int, int]  # M, K, N of the layer

    @property
    def name(self) -> str:
        m, k, n = self.shape
        return f"{SUITE} {self.order} {m}x{k}->{n} fp32"

    @torch.no_grad()
    def measure(self, device: torch.device, seconds: float) -> list[Row]:
        m, k, n = self.shape
        x = torch.rand(m, k, device=device)
        w = torch.empty(n, k, device=device).uniform_(-1, 1) / math.sqrt(k)
        dz = torch.randn(m, n, device=device)
        a, b = ORDERS[self.order](x, w, dz)
        operands = {SPLIT: (a, b), SGEMM: (a, b), TF32: (a, b), FP16: (a.half(), b.half())}
        if self.order == "x W^T":
            for name, exact_rows in ((ONE_EXACT, slice(0, 1)), (ALL_EXACT, slice(None))):
                operands[name] = (_left_to_the_exact_kernel(a, exact_rows), b)
        calls = {name: partial(_PRODUCTS.get(name, ops.split_matmul), *pair) for name, pair in operands.items()}
        rows = {name: Row(SUITE, self.name, name, work=2.0 * m * k * n, unit="TFLOP/s") for name in calls}
        with matmul_precision("fp32"):
            errors = {}
            for name, (left, _) in operands.items():
                exact_of = a if name == FP16 else left
                errors.update(product_errors({name: calls[name]()}, exact_of, b))
                set_error(rows[name], errors[name])
            worse = worse_than(errors[SPLIT], errors[SGEMM])
            if worse:
                rows[SPLIT].status, rows[SPLIT].detail = FAILED, "; ".join(worse)
            timings = interleave({name: lambda _, call=call: call() for name, call in calls.items()}, device, seconds)
        for name, timing in timings.items():
            set_time(rows[name], timing)
        for row in rows.values():
            row.limit_ms = 3 * timings[FP16].median
        return list(rows.values())


def _tf32_product(a: Tensor, b: Tensor) -> Tensor:
    with matmul_precision("tf32"):
        return torch.mm(a, b)


_PRODUCTS = {SGEMM: torch.mm, TF32: _tf32_product, FP16: torch.mm}


def _left_to_the_exact_kernel(a: Tensor, rows: slice) -> Tensor:
    """a with one element in each of these rows that makes the others too small for the two halves to hold."""
    a = a.clone()
    a[rows, 0] = 2.0**40
    return a


X_SPLIT = SplitOf("x", GEMM_LARGE[0], GEMM_LARGE[1])
W_SPLIT = SplitOf("W", GEMM_LARGE[2], GEMM_LARGE[1])


def problems() -> list[SplitOf | Product]:
    columns = SplitOf("the columns of x", GEMM_LARGE[0], GEMM_LARGE[1], transposed=True)
    return [X_SPLIT, W_SPLIT, columns, *(Product(order, GEMM_LARGE) for order in ORDERS)]
