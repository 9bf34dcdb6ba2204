"""The split GEMM by itself: bits, accuracy beside cuBLAS's, Inf and NaN, memory."""

from __future__ import annotations

import oracle
import pytest
import torch
from linear_cases import fp32_precision, hopper, max_error
from split_cases import (
    HIDDEN,
    OPERANDS,
    UNIT,
    errors,
    exact_product,
    excess,
    held_by_planes,
    left_to_exact_kernel,
    near_one,
    normal,
    spanning,
    times,
    uniform,
)
from torch import Tensor

from cutlass_bn.ops import product
from cutlass_bn.ops.product import FP32_PRODUCTS

pytestmark = [pytest.mark.gpu, hopper]
COLUMNS = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


def split_matmul(a: Tensor, b: Tensor) -> Tensor:
    return product.fp32_matmul(a, b, FP32_PRODUCTS["split"], True)


def stored(matrix: Tensor, columns: bool) -> Tensor:
    """The same matrix dense in columns or in rows, as a misaligned window into NaN."""
    base = matrix.t() if columns else matrix
    around = matrix.new_full([size + 5 for size in base.shape], torch.nan)
    view = around[3 : 3 + base.size(0), 1 : 1 + base.size(1)]
    view.copy_(base)
    return view.t() if columns else view


def mm(x: Tensor, w: Tensor) -> Tensor:
    """cuBLAS SGEMM's."""
    with fp32_precision(tf32=False):
        return torch.mm(x, w.t())


def split(x: Tensor, w: Tensor) -> Tensor:
    return split_matmul(x, w.t())


ROWS = {
    "zeros": lambda k: torch.zeros(1, k),
    "normal": lambda k: normal(1, k, "cpu"),
    "minus zero": lambda k: torch.full((1, k), -0.0),
    "one element": lambda k: torch.eye(1, k),
    "powers of two": lambda k: torch.exp2(-torch.arange(k).float() % 140)[None],
    "few bits": lambda k: torch.randint(-2048, 2049, (1, k)) / 64,
    "ties of the high half": lambda k: 1 + (torch.randint(0, 512, (1, k)) * 2 + 1) * 2.0**-11,
    "all bits": lambda k: uniform(1, k, "cpu") * (2 - 2**-23),
    "largest": lambda k: torch.full((1, k), torch.finfo(torch.float32).max),
    "smallest normal": lambda k: times(torch.finfo(torch.float32).tiny)(1, k, "cpu"),
    "denormal": lambda k: times(1e-41)(1, k, "cpu"),
    "the smallest": lambda k: torch.full((1, k), 2.0**-149),
    "largest and smallest": lambda k: torch.where(torch.arange(k) % 2 == 0, 3e38, 1e-45)[None],
    **{f"{b} binades": lambda k, b=b: spanning(b)(1, k, "cpu") for b in (10, 25, 30, 35, 60)},
    # As small as the planes hold them: denormal halves.
    "28 binades": lambda k: near_one(1, k, "cpu") * torch.exp2(-28 * uniform(1, k, "cpu")),
    "infinity": lambda k: normal(1, k, "cpu").index_fill_(1, torch.tensor(k // 2), -torch.inf),
    "NaN": lambda k: normal(1, k, "cpu").index_fill_(1, torch.tensor(k - 1), torch.nan),
}


def bits(x: Tensor, selector: Tensor, transposed: bool, columns: bool) -> Tensor:
    """x selector^T, twice the same; transposed: as the transpose of its transpose."""
    operands = (selector, x.t()) if transposed else (x, selector.t())
    a, b = (stored(operand.cuda(), columns) for operand in operands)
    oracle.poison("cuda", len(x) * len(selector))
    result = split_matmul(a, b)
    assert torch.equal(split_matmul(a, b).nan_to_num(7.0), result.nan_to_num(7.0))
    return (result.t() if transposed else result).cpu()


@COLUMNS
@pytest.mark.parametrize("transposed", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("k", [1, 3, 8, 33, 257, 1024, 4099, 65537])
def test_split_bit_for_bit(k, transposed, columns):
    """Times rows of the identity, rows of each kind are what their planes hold.

    Or they are themselves, where the split leaves that to plain sums: a whole tile at a time, so
    those rows go by themselves. As many again that a tile of rows is left over.
    """
    rows = torch.cat([row(k) for row in ROWS.values()] * (11 if k < 5000 else 1))
    chosen = torch.randperm(k)[: 2**25 // k]
    selector = torch.zeros(len(chosen), k).scatter_(1, chosen[:, None], 1.0)
    left = left_to_exact_kernel(rows, selector[:1])[:, 0]
    held = held_by_planes(rows[~left])[:, chosen]
    assert torch.equal(bits(rows[~left], selector, transposed, columns).double(), held)
    ours = bits(rows[left], selector, transposed, columns)
    exact = rows[left].double() @ selector.double().t()
    torch.testing.assert_close(ours.double(), exact, rtol=0.0, atol=0.0, equal_nan=True)


@COLUMNS
@pytest.mark.parametrize("large", [1, 7, 32, 59])
def test_census_at_its_bound(large, columns):
    """As many large elements as may be: one that is counted too many, and the planes' sum shows."""
    k = 64
    x = torch.full((3, k), 1 + 2.0**-16)  # of which the planes hold 1 in these rows
    x[:, :large] = 2.0**29  # 2^-12 of the largest, so just large
    x[:, 0] = 2.0**41
    w = torch.ones(5, k)
    w[:, :large] = 0.0
    assert left_to_exact_kernel(x, w).all()
    assert not torch.equal(held_by_planes(x), x.double())
    a, b = (stored(operand.cuda(), columns) for operand in (x, w.t()))
    assert torch.equal(split_matmul(a, b).cpu(), exact_product(x, w).float())


SIZES = [
    *(
        (1, 1, 1),
        (2, 3, 1),
        (3, 2, 5),
        (7, 5, 3),
        (1, 70, 17),
        (70, 1, 64),
        (31, 37, 41),
        (33, 65, 70),
        (64, 64, 64),
    ),
    *((127, 129, 63), (128, 128, 128), (129, 257, 255), (200, 136, 1000), (130, 140, 65536)),
    *((70_001, 3, 40), (3, 70_001, 40)),  # more than a grid dimension has blocks
    *((5, 7, 0), (0, 7, 5), (5, 0, 7)),
]


@pytest.mark.parametrize("b_columns", [False, True], ids=["b in rows", "b in columns"])
@pytest.mark.parametrize("a_columns", [False, True], ids=["a in rows", "a in columns"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_size_and_order(sizes, a_columns, b_columns):
    m, n, k = sizes
    x, w = normal(m, k, "cuda"), normal(n, k, "cuda")
    a, b = stored(x, a_columns), stored(w.t(), b_columns)
    oracle.poison("cuda", m * n)
    c = split_matmul(a, b)
    assert (c.shape, c.dtype) == ((m, n), torch.float32)
    assert c.is_contiguous()
    assert excess(c, x, w, extra=8) <= 1
    assert torch.equal(split_matmul(a, b), c)


@pytest.mark.parametrize(
    ("operands", "k"),
    [
        *((operands, k) for k in (128, 1001, 4096) for operands in OPERANDS),
        *((operands, 65536) for operands in OPERANDS if operands.why in ("uniform", "normal")),
    ],
    ids=str,
)
def test_no_less_accurate_than_sgemm(operands, k):
    x, w = operands.make(1500, 1100, k)
    ours, theirs = errors(split(x, w), x, w), errors(mm(x, w), x, w)
    # Where rows span so much that plain sums stand in for the split, these have another order than
    # cuBLAS's.
    plain_sums = left_to_exact_kernel(x, w).any()
    for name, error in ours.items():
        allowed = (2.0 if plain_sums else 1.0) * max(theirs[name], UNIT)
        assert error <= allowed, f"{name}: {error:.3g}, SGEMM's {theirs[name]:.3g}"


@pytest.mark.parametrize("k", [512, 1001])
@pytest.mark.parametrize("operands", HIDDEN, ids=str)
def test_no_element_is_lost(operands, k):
    """The bound that plain float32 sums keep in every output, whatever else is in the rows."""
    x, w = operands.make(300, 200, k)
    assert excess(split(x, w), x, w) <= 1


def _set(x: Tensor, row: int, column: int, value: float) -> None:
    x[row, column] = value


NOT_FINITE = {
    "infinity": lambda x, w: _set(x, 7, 3, torch.inf),
    "minus infinity in the weight": lambda x, w: _set(w, 5, 100, -torch.inf),
    "NaN": lambda x, w: _set(x, 66, 259, torch.nan),
    "NaN in the weight": lambda x, w: _set(w, 71, 0, torch.nan),
    "infinity meets zero": lambda x, w: (_set(x, 7, 3, torch.inf), _set(w, slice(None), 3, 0.0)),
    "both infinities in a row": lambda x, w: (_set(x, 7, 3, torch.inf), _set(x, 7, 4, -torch.inf)),
    "infinities meet": lambda x, w: (
        _set(x, slice(None, 9), 3, torch.inf),
        _set(w, slice(None, 9), 3, -torch.inf),
    ),
    "overflow": lambda x, w: (
        _set(x, 7, slice(None), 0.0),
        _set(x, 7, 2, 3e38),
        _set(w, slice(None), 2, 0.5),
        _set(w, slice(5, 9), 2, -2.0),
    ),
    "every row": lambda x, w: _set(x, slice(None), 11, torch.nan),
}


@pytest.mark.parametrize("kind", NOT_FINITE)
def test_inf_and_nan_land_where_torch_puts_them(kind):
    x, w = normal(131, 260, "cuda"), normal(72, 260, "cuda")
    NOT_FINITE[kind](x, w)
    ours, theirs = split(x, w), mm(x, w)
    for mask in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(mask(ours), mask(theirs)), mask.__name__
    assert not theirs.isfinite().all()
    finite = theirs.isfinite()
    assert max_error(ours[finite], theirs[finite]) < 1e-6 if finite.any() else kind == "every row"


def test_cuda_graph():
    """A replay sees new values, rows that need plain sums among them, and gives the same bits."""
    x, w = normal(700, 1000, "cuda"), spanning(60)(300, 1000, "cuda")
    split(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        u = split(x, w)
    for values in (normal, spanning(60), normal):
        x.copy_(values(700, 1000, "cuda"))
        assert left_to_exact_kernel(x, w).any() == (values is not normal)
        graph.replay()
        assert torch.equal(u, split(x, w))
        assert max_error(u, exact_product(x, w)) < 1e-6


@COLUMNS
@pytest.mark.parametrize(
    "sizes", [(20_001, 1500, 4093), (1500, 20_001, 4093), (300, 1300, 65_536)], ids=str
)
def test_the_larger_operand_is_split_in_blocks(sizes, columns):
    """Of 128 MiB of planes, or 256 where smaller ones don't fill the GPU; the smaller one whole."""
    m, n, k = sizes
    x, w = normal(m, k, "cuda"), normal(n, k, "cuda")
    # The last result is made of what the planes can't hold: for the exact kernel.
    for i, operand in enumerate((x, w)):
        operand[-1] *= 2.0**-45
        operand[-1, i] = 1.0
    a, b = stored(x, columns), stored(w.t(), columns)
    oracle.poison("cuda", m * n)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    c = split_matmul(a, b)
    workspace = torch.cuda.max_memory_allocated() - before - c.untyped_storage().nbytes()
    if n % 4:  # the kernel writes rows of whole vectors, and c is their copy
        workspace -= 4 * m * (n + 3)
    block = 2**28 if k == 65_536 else 2**27
    assert workspace <= 4 * min(m, n) * (k + 8) + block + 32 * (m + n) + 2**20
    assert excess(c, x, w, extra=8) <= 1


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """In the input, and then in the output."""
    for m, n, k in (((1 << 20) + 3, 8, 2056), ((1 << 19) + 3, 4104, 16)):
        x, w = normal(m, k, "cuda"), normal(n, k, "cuda")
        u = split(x, w)
        for rows in (slice(0, 300), slice(m - 300, m)):
            assert excess(u[rows], x[rows], w, extra=8) <= 1
