"""From which size on the split GEMM is faster than cuBLAS's SGEMM, over a grid: what the dispatcher's rule rests on."""

from __future__ import annotations

import math

import torch

from cutlass_bn.ops import linear_batch_norm as ops

from .accuracy import layer_path
from .cases import matmul_precision
from .errors import product_errors, set_error
from .peers import rotations
from .records import SGEMM, SPLIT, Row
from .timing import interleave, set_time

SUITE = "crossover"
ROWS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
COLUMNS = (256, 1024, 4096, 8192)
DEPTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
QUICK_ROWS, QUICK_COLUMNS, QUICK_DEPTHS = (64, 512, 4096), (1024, 4096), (64, 512, 4096)

# Of timing a point: small problems get the rounds, each of 1.5 ms (timing.LEAD_CYCLES), large ones the seconds.
SECONDS, ROUNDS = 0.06, 20
ERROR_ROWS = 512  # of x whose errors are measured


def grid(quick: bool = False) -> list[tuple[int, int, tuple[int, ...]]]:
    """(M, N, the depths K)."""
    rows, columns, depths = (QUICK_ROWS, QUICK_COLUMNS, QUICK_DEPTHS) if quick else (ROWS, COLUMNS, DEPTHS)
    return [(m, n, depths) for m in rows for n in columns]


def line_name(m: int, n: int) -> str:
    return f"{SUITE} M={m} N={n}"


def point_name(m: int, n: int, k: int) -> str:
    return f"{line_name(m, n)} K={k}"


@torch.no_grad()
def measure(m: int, n: int, depths: tuple[int, ...], device: torch.device) -> list[Row]:
    """A row for SGEMM and one for the split GEMM at every depth."""
    rows = []
    for k in depths:
        inputs = [torch.rand(m, k, device=device) for _ in range(rotations(m * k * 4, device))]
        w = torch.empty(n, k, device=device).uniform_(-1, 1) / math.sqrt(k)
        products = {SGEMM: torch.mm, SPLIT: ops.split_matmul}
        calls = {
            name: lambda i, product=product, inputs=inputs, w=w: product(inputs[i % len(inputs)], w.t())
            for name, product in products.items()
        }
        with matmul_precision("fp32"):
            path = layer_path(inputs[0], w)
            part = inputs[0][:ERROR_ROWS]
            results = {name: product(inputs[0], w.t())[:ERROR_ROWS] for name, product in products.items()}
            errors = product_errors(results, part, w.t())
            timings = interleave(calls, device, SECONDS, max_rounds=ROUNDS)
        for name, timing in timings.items():
            row = Row(SUITE, point_name(m, n, k), name, work=2.0 * m * k * n, unit="TFLOP/s", path=path)
            set_time(row, timing)
            set_error(row, errors[name])
            rows.append(row)
    return rows
