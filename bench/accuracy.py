"""How exact fp32 products are: the split GEMM and cuBLAS's SGEMM against float64, over many kinds of input.

The contract is that where the layer takes the split, its error is no larger than SGEMM's on the same input: in the
Frobenius norm, and for every output over the norms of its row and column. Of the exceptions this is known not to hold:
two fp16 numbers hold 23 bits of an element, not 24. Every output, theirs too, has to keep SGEMM's a-priori bound.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import cutlass_bn
from cutlass_bn.ops import linear_batch_norm as ops

from .cases import matmul_precision
from .errors import outside_bound, product_errors, set_error, worse_than
from .records import FAILED, SGEMM, SPLIT, Row, Run

SUITE = "accuracy"
LARGEST, SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny  # the latter not a denormal
DEPTHS = (1, 16, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
QUICK_DEPTH, QUICK_OUTPUTS = 4096, 1 << 24  # a quick run leaves longer and larger ones out
SPANS = (10, 20, 40, 60)  # binades


class Draw:
    """Random float32 matrices, the same for the same seed (on the same kind of device)."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return torch.empty(shape, device=self.device).uniform_(low, high, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device).normal_(generator=self.generator)

    def integers(self, *shape: int, low: int, high: int) -> Tensor:
        """low <= values < high."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def sign(self, *shape: int) -> Tensor:
        return 1.0 - 2.0 * self.integers(*shape, low=0, high=2)

    def powers(self, *shape: int, span: int) -> Tensor:
        """2^-e with e uniform over 0 to span."""
        return torch.exp2(-self.integers(*shape, low=0, high=span + 1).double()).float()

    def linear(self, n: int, k: int) -> Tensor:
        """As torch.nn.Linear initialises its weight."""
        return self.uniform(n, k, low=-1.0, high=1.0) / math.sqrt(k)

    def denormal(self, *shape: int) -> Tensor:
        return (self.sign(*shape).double() * self.integers(*shape, low=1, high=1 << 23) * 2.0**-149).float()


Pair = tuple[Tensor, Tensor]  # x [M, K], W [N, K]
Maker = Callable[[Draw, int, int, int], Pair]  # of M, K, N


def uniform(draw: Draw, m: int, k: int, n: int) -> Pair:
    return draw.uniform(m, k), draw.linear(n, k)


def normal(draw: Draw, m: int, k: int, n: int) -> Pair:
    return draw.normal(m, k), draw.normal(n, k)


def all_positive(draw: Draw, m: int, k: int, n: int) -> Pair:
    """An accumulator that truncates shows here: its bias only grows."""
    return draw.uniform(m, k), draw.uniform(n, k)


def cancelling(draw: Draw, m: int, k: int, n: int) -> Pair:
    """The second half of every sum takes away all but about 2^-12 of the first."""
    x, w = draw.normal(m, k // 2), draw.normal(n, k // 2)
    return torch.cat([x, x], 1), torch.cat([w, -w * (1 + 2.0**-12 * draw.normal(n, k // 2))], 1)


def half_zeros(draw: Draw, m: int, k: int, n: int) -> Pair:
    return draw.normal(m, k).relu_(), draw.linear(n, k)


def rows_of_zeros(draw: Draw, m: int, k: int, n: int) -> Pair:
    x, w = normal(draw, m, k, n)
    x[::4], w[::8] = 0.0, 0.0
    return x, w


def rows_of_their_own_scale(draw: Draw, m: int, k: int, n: int) -> Pair:
    x, w = normal(draw, m, k, n)
    return x * draw.powers(m, 1, span=40), w * draw.powers(n, 1, span=40)


def denormal(draw: Draw, m: int, k: int, n: int) -> Pair:
    return draw.denormal(m, k), draw.normal(n, k) * 2.0**40


def denormal_results(draw: Draw, m: int, k: int, n: int) -> Pair:
    return draw.denormal(m, k), draw.linear(n, k)


def largest(draw: Draw, m: int, k: int, n: int) -> Pair:
    """Every partial sum stays finite: |W| < 1 / K."""
    x = draw.sign(m, k) * draw.uniform(m, k, low=0.5, high=1.0) * LARGEST
    return x, draw.uniform(n, k, low=-1.0, high=1.0) / k


def largest_by_smallest(draw: Draw, m: int, k: int, n: int) -> Pair:
    x = draw.sign(m, k) * draw.uniform(m, k, low=0.5, high=1.0) * LARGEST
    return x, draw.sign(n, k) * draw.uniform(n, k, low=1.0, high=2.0) * SMALLEST


def smallest(draw: Draw, m: int, k: int, n: int) -> Pair:
    return draw.sign(m, k) * draw.uniform(m, k, low=1.0, high=2.0) * SMALLEST, draw.normal(n, k)


def spanning_x(span: int, draw: Draw, m: int, k: int, n: int) -> Pair:
    return draw.normal(m, k) * draw.powers(m, k, span=span), draw.normal(n, k)


def spanning_w(span: int, draw: Draw, m: int, k: int, n: int) -> Pair:
    return draw.normal(m, k), draw.normal(n, k) * draw.powers(n, k, span=span)


def large_meet_zeros(span: int, draw: Draw, m: int, k: int, n: int) -> Pair:
    """x's even columns are 2^span times its odd ones, and meet zeros: every result is made of the small elements."""
    x, w = normal(draw, m, k, n)
    x[:, 1::2] *= 2.0**-span
    w[:, ::2] = 0.0
    return x, w


def diagonals(draw: Draw, m: int, k: int, n: int) -> Pair:
    """Results of one product each, which SGEMM rounds once."""
    x, w = torch.zeros(m, k, device=draw.device), torch.zeros(n, k, device=draw.device)
    for matrix in (x, w):
        matrix.diagonal().copy_(draw.normal(min(matrix.shape)))
    return x, w


def identity(draw: Draw, m: int, k: int, n: int) -> Pair:
    return torch.eye(m, k, device=draw.device), draw.normal(n, k)


def _scattered(draw: Draw, k: int, values: Tensor) -> Tensor:
    """A row of k for every row of values, which lie anywhere in it among zeros."""
    places = draw.uniform(len(values), k).topk(values.shape[1], 1).indices
    return torch.zeros(len(values), k, device=draw.device).scatter_(1, places, values)


def one_hot(draw: Draw, m: int, k: int, n: int) -> Pair:
    """SGEMM is exact."""
    return _scattered(draw, k, torch.ones(m, 1, device=draw.device)), draw.normal(n, k)


def few_in_a_row(count: int, draw: Draw, m: int, k: int, n: int) -> Pair:
    return _scattered(draw, k, draw.normal(m, count)), draw.normal(n, k)


def neighbours_cancel(draw: Draw, m: int, k: int, n: int) -> Pair:
    """x = (a, a, b, b, ...), and W = (c, -c, d, -d, ...) to about 2^-12: SGEMM's running sums stay small."""
    x, w = draw.normal(m, k // 2), draw.normal(n, k // 2)
    minus = -w * (1 + 2.0**-12 * draw.normal(n, k // 2))
    return x.repeat_interleave(2, 1), torch.stack([w, minus], 2).flatten(1)


EXCEPTION = "exception: "  # how the names of the exceptions begin, in records too


@dataclass(frozen=True)
class Input:
    """A kind of input."""

    what: str
    make: Maker
    m: int = 2048
    k: int = 4096
    n: int = 2048
    exception: bool = False  # SGEMM may be the more exact

    @property
    def name(self) -> str:
        return f"{EXCEPTION if self.exception else ''}{self.what}, {self.m}x{self.k}->{self.n}"


def under_contract() -> list[Input]:
    kinds = [
        Input("uniform [0, 1), Linear's W", uniform),
        Input("normal", normal),
        Input("all positive", all_positive),
        Input("cancelling sums", cancelling),
        Input("half of x zeros (ReLU)", half_zeros),
        Input("rows of zeros among others", rows_of_zeros),
        Input("every row at its own scale, over 40 binades", rows_of_their_own_scale),
        Input("x denormal, W near 2^40", denormal),
        Input("x denormal, results too", denormal_results),
        Input("x near the largest fp32", largest),
        Input("x near the largest, W near the smallest normal fp32", largest_by_smallest),
        Input("x near the smallest normal fp32", smallest),
        *(Input(f"rows of x span {span} binades", partial(spanning_x, span)) for span in SPANS),
        Input("rows of W span 40 binades", partial(spanning_w, 40)),
        *(
            Input(f"x spans {span} binades, its large half meets zeros", partial(large_meet_zeros, span))
            for span in SPANS
        ),
    ]
    for what, make in (("normal", normal), ("all positive", all_positive)):
        for k in DEPTHS:
            size = 1024 if k > 16384 else 2048
            kinds.append(Input(what, make, size, k, size))
    # So many outputs that the plain tile is taken, however long the sums.
    large: list[tuple[str, Maker, tuple[int, ...]]] = [
        ("uniform [0, 1), Linear's W", uniform, (4096,)),
        ("normal", normal, (4096, 16384)),
        ("all positive", all_positive, (4096, 16384)),
        ("cancelling sums", cancelling, (4096,)),
        ("rows of x span 40 binades", partial(spanning_x, 40), (4096,)),
    ]
    kinds += [Input(what, make, 8192, k, 8192) for what, make, depths in large for k in depths]
    return list({kind.name: kind for kind in kinds}.values())  # the depth of the first few comes twice


def exceptions() -> list[Input]:
    """SGEMM rounds sums, the split elements: SGEMM wins where there are few sums to round, or small ones."""
    kinds = [
        Input("diagonal times diagonal", diagonals, 4096, 4096, 4096),
        Input("identity times normal W^T", identity, 4096, 4096, 4096),
        Input("one 1.0 in each row of x", one_hot),
        Input("one normal number in each row of x", partial(few_in_a_row, 1)),
        *(Input(f"{count} normal numbers in each row of x", partial(few_in_a_row, count)) for count in (4, 16)),
        Input("neighbouring terms cancel", neighbours_cancel),
        Input("all positive, where cuBLAS splits K", all_positive, 1280, 2048, 1280),
    ]
    return [replace(kind, exception=True) for kind in kinds]


def inputs(quick: bool = False) -> list[Input]:
    kinds = [*under_contract(), *exceptions()]
    return [kind for kind in kinds if not quick or (kind.k <= QUICK_DEPTH and kind.m * kind.n <= QUICK_OUTPUTS)]


def recorded(run: Run, exception: bool = False) -> Iterator[tuple[str, dict[str, Row]]]:
    """(input, its rows by variant) of the inputs under the contract, or of the exceptions."""
    return ((name, rows) for name, rows in run.by_variant(SUITE) if name.startswith(EXCEPTION) is exception)


TILE = (128, 64)  # what the exact kernel recomputes at a time
LOSSY = -(2**31)  # in the census (csrc/linear_bn/split/split.h)


def exact_tiles(x: Tensor, w: Tensor) -> float:
    """The share of x W^T's tiles with a product that the split leaves to the exact kernel."""
    x_census, w_census = (ops.split_fp32(matrix, False)[2] for matrix in (x, w))
    lossy = (x_census < 0)[:, None] | (w_census < 0)
    left = lossy & ((x_census & ~LOSSY)[:, None] + (w_census & ~LOSSY) <= x.size(1))
    tiles = [part.any() for rows in left.split(TILE[0]) for part in rows.split(TILE[1], 1)]
    return torch.stack(tiles).double().mean().item()


def _layer_plan(x: Tensor, w: Tensor) -> cutlass_bn.Plan:
    return cutlass_bn.explain(cutlass_bn.functional.linear_batch_norm, x, w, training=True)


def layer_path(x: Tensor, w: Tensor) -> str:
    """Which product the layer's training forward takes: SPLIT or SGEMM."""
    return SPLIT if _layer_plan(x, w).path == "fused" else SGEMM


def split_tile(x: Tensor, w: Tensor) -> str:
    """The split's tile, by the rule that the layer and split_matmul share; "" where the layer takes SGEMM."""
    return _layer_plan(x, w).tile


@torch.no_grad()
def measure(kind: Input, device: torch.device, seed: int) -> list[Row]:
    """A row for SGEMM and one for the split GEMM, whichever of them the layer takes."""
    x, w = kind.make(Draw(device, seed ^ zlib.crc32(kind.name.encode())), kind.m, kind.k, kind.n)
    with matmul_precision("fp32"):
        path, tile = layer_path(x, w), split_tile(x, w)
        results = {SGEMM: torch.mm(x, w.t()), SPLIT: ops.split_matmul(x, w.t())}
    errors = product_errors(results, x, w.t())
    rows = {name: Row(SUITE, kind.name, name, metric="error", path=path) for name in results}
    for name, row in rows.items():
        set_error(row, errors[name])
    rows[SPLIT].tile, rows[SPLIT].exact_tiles = tile, exact_tiles(x, w)
    failures = []
    if path == SPLIT:
        failures = outside_bound(errors[SPLIT])
        if not kind.exception:
            failures += worse_than(errors[SPLIT], errors[SGEMM])
    if failures:
        rows[SPLIT].status, rows[SPLIT].detail = FAILED, "; ".join(failures)
    return list(rows.values())
