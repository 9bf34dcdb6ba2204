"""fp32 products on tensor cores beside cuBLAS's: how exact by kind of input, how fast by size.

The contract is that of tests/gemm/test_split_matmul.py: where the layer takes the split GEMM, its
error is no larger than SGEMM's, in the Frobenius norm and for every output over the norms of its
row and column. Of the exceptions this is known not to hold, as two fp16 numbers hold 23 bits of an
element, not 24. Every output, theirs too, has to keep SGEMM's a-priori bound.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import split_cases
import torch
from split_cases import OPERANDS, UNIT, Matrix, identity, normal, sparse, times, uniform
from torch import Tensor

import cutlass_bn
from cutlass_bn.ops.product import FP32_PRODUCTS

from .cases import Options, matmul_precision
from .errors import ProductError, fail, of_products
from .records import SGEMM, SPLIT, Row
from .timing import interleave, rotations, set_time

DEPTHS = (1, 16, 64, 128, 256, 512, 1024, 16384, 65536)
TILE = (128, 64)  # what the exact kernel computes at a time
# The crossover's M, N, and depths K of every (M, N).
GRID = (
    (16, 64, 128, 256, 512, 1024, 2048, 4096, 16384),
    (256, 1024, 4096, 8192),
    (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
)
# Of timing one of its points: small problems get the rounds, large ones the seconds.
POINT_SECONDS, POINT_ROUNDS = 0.06, 20
ERROR_ROWS = 512  # of x whose errors are measured there


def split_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.cutlass_bn.fp32_matmul(a, b, FP32_PRODUCTS["split"], always_split=True)


PRODUCTS = {SGEMM: torch.mm, SPLIT: split_product}


@dataclass(frozen=True)
class Input:
    """A kind of input: x [M, K] and W [N, K]."""

    what: str
    x: Matrix
    w: Matrix
    m: int = 2048
    k: int = 4096
    n: int = 2048
    exception: bool = False  # SGEMM may be the more exact

    @property
    def name(self) -> str:
        return f"{'exception: ' * self.exception}{self.what}, {self.m}x{self.k}->{self.n}"


def neighbours(sign: float, noise: float) -> Matrix:
    """Each number beside sign times it, up to some noise."""

    def matrix(rows: int, k: int, device: str) -> Tensor:
        one = normal(rows, k // 2, device)
        other = sign * one * (1 + noise * normal(rows, k // 2, device))
        return torch.stack([one, other], 2).flatten(1)

    return matrix


def inputs(quick: bool) -> list[Input]:
    found = [Input(operands.why, operands.x, operands.w) for operands in OPERANDS]
    found.append(Input("half of x zeros", lambda *shape: normal(*shape).relu(), normal))
    for what, matrix in (("normal", normal), ("all positive", uniform)):
        # Large: so many outputs that the plain tile is taken, however long the sums.
        sizes = [(1024 if k > 16384 else 2048, k) for k in DEPTHS] + [(8192, 4096), (8192, 16384)]
        found += [Input(what, matrix, matrix, size, k, size) for size, k in sizes]
    diagonal: Matrix = lambda *shape: identity(*shape) * normal(*shape)  # noqa: E731
    found += [
        Input("diagonal times diagonal", diagonal, diagonal, exception=True),
        Input("about two numbers in each row of W", normal, sparse, exception=True),
        Input("neighbours cancel", neighbours(1, 0), neighbours(-1, 2.0**-12), exception=True),
        Input("cuBLAS splits K", uniform, uniform, 1280, 2048, 1280, exception=True),
    ]
    return [kind for kind in found if not quick or max(kind.k, kind.m) <= 4096]


def layer_plan(x: Tensor, w: Tensor) -> tuple[str, str]:
    """(which of SPLIT and SGEMM the layer's training forward takes, the split's tile)."""
    plan = cutlass_bn.explain(cutlass_bn.functional.linear_batch_norm, x, w, training=True)
    return SPLIT if plan.path == "fused" else SGEMM, plan.tile


def exact_tiles(x: Tensor, w: Tensor) -> float:
    """The share of x W^T's tiles with a product that the split leaves to the exact kernel."""
    left = split_cases.left_to_exact_kernel(x, w)
    tiles = [part.any() for rows in left.split(TILE[0]) for part in rows.split(TILE[1], 1)]
    return torch.stack(tiles).double().mean().item()


def _set_errors(rows: Mapping[str, Row], errors: Mapping[str, ProductError]) -> None:
    for name, (most, relative, rowwise, _) in errors.items():
        row = rows[name]
        row.max_abs_error, row.relative_error, row.rowwise_error = most, relative, rowwise


@torch.no_grad()
def measure(suite: str, kind: Input, options: Options) -> list[Row]:
    """A row of errors for SGEMM and one for the split GEMM, whichever of them the layer takes."""
    torch.manual_seed(options.seed ^ zlib.crc32(kind.name.encode()))
    x, w = kind.x(kind.m, kind.k, options.device), kind.w(kind.n, kind.k, options.device)
    with matmul_precision("fp32"):
        path, tile = layer_plan(x, w)
        results = {name: product(x, w.t()) for name, product in PRODUCTS.items()}
    errors = of_products(results, x, w.t())
    rows = {name: Row(suite, kind.name, name, "error", path=path) for name in results}
    _set_errors(rows, errors)
    split = rows[SPLIT]
    split.tile, split.exact_tiles = tile, exact_tiles(x, w)
    ours, sgemms = errors[SPLIT], errors[SGEMM]
    checks = [("an output's error over its bound", ours.of_bound, 1.0)]
    if not kind.exception:
        # Where plain sums stand in for the split, their order is another than SGEMM's.
        factor = 2.0 if split.exact_tiles else 1.0
        for name in ("relative", "rowwise"):
            most = factor * max(getattr(sgemms, name), UNIT)
            checks.append((f"{name} error", getattr(ours, name), most))
    if path == SPLIT:
        fail(split, checks)
    return list(rows.values())


class Line(NamedTuple):
    """Of the crossover's grid: one M and N, every depth K."""

    m: int
    n: int
    depths: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"crossover M={self.m} N={self.n}"


def lines(quick: bool) -> list[Line]:
    rows, columns, depths = (axis[1::3] if quick else axis for axis in GRID)
    return [Line(m, n, depths) for m in rows for n in columns]


def _call(product: Callable, inputs: list[Tensor], b: Tensor, index: int) -> Tensor:
    return product(inputs[index % len(inputs)], b)


@torch.no_grad()
def measure_line(suite: str, line: Line, options: Options) -> list[Row]:
    """SGEMM and the split at every depth: what the dispatcher's choice between them rests on."""
    found, (m, n), device = [], (line.m, line.n), options.device
    for k in line.depths:
        inputs = [uniform(m, k, device) for _ in range(rotations(4 * m * k, device))]
        w = times(k**-0.5)(n, k, device)
        calls = {name: partial(_call, product, inputs, w.t()) for name, product in PRODUCTS.items()}
        with matmul_precision("fp32"):
            path, _ = layer_plan(inputs[0], w)
            results = {name: call(0)[:ERROR_ROWS] for name, call in calls.items()}
            timings = interleave(calls, device, POINT_SECONDS, most=POINT_ROUNDS)
        work = {"work": 2.0 * m * k * n, "unit": "TFLOP/s"}
        rows = {name: Row(suite, f"{line.name} K={k}", name, path=path, **work) for name in calls}
        _set_errors(rows, of_products(results, inputs[0][:ERROR_ROWS], w.t()))
        for name, timing in timings.items():
            set_time(rows[name], timing)
        found += rows.values()
    return found
