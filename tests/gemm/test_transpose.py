"""TF32 products of which one operand is transposed in memory first (csrc/linear_bn/policy.cpp).

Small integers are exact in TF32, and so are their sums: every element of the transpose shows.
"""

from __future__ import annotations

import oracle
import pytest
import torch
from linear_cases import fp32_precision, hopper
from torch import Tensor

from cutlass_bn.ops import product
from cutlass_bn.ops.product import FP32_PRODUCTS

pytestmark = [pytest.mark.gpu, hopper]


@pytest.fixture(autouse=True)
def _tf32():
    with fp32_precision(tf32=True):
        yield


def tf32_matmul(a: Tensor, b: Tensor) -> Tensor:
    return product.fp32_matmul(a, b, FP32_PRODUCTS["tf32"])


def integers(rows: int, columns: int) -> Tensor:
    return torch.randint(-8, 9, (rows, columns), device="cuda", dtype=torch.float32)


def window(matrix: Tensor, pad: int, first: int) -> Tensor:
    """The same in rows that are longer by pad, from the column `first` on, amid NaN."""
    around = matrix.new_full((matrix.size(0) + 3, matrix.size(1) + pad), torch.nan)
    return around[2:-1, first : first + matrix.size(1)].copy_(matrix)


def offset(matrix: Tensor) -> Tensor:
    """The same, dense, at an address that is aligned to nothing."""
    return matrix.new_empty(matrix.numel() + 1)[1:].view_as(matrix).copy_(matrix)


LAYOUTS = {
    "dense": lambda t: t,
    "window": lambda t: window(t, 4, 0),  # rows stay aligned where columns are a multiple of 4
    "window at odd addresses": lambda t: window(t, 5, 1),
    "an odd address": offset,
    "all rows the same": lambda t: t[:1].expand_as(t),
}
# M, K, N. a is in columns, and the transposed matrix [K, min(M, N)].
COLUMNS = [
    (65, 63, 524_500),
    (64, 64, 524_288),
    (68, 64, 493_448),
    (1000, 129, 16_648),
    (36, 4000, 29_128),
    (7, 5, 61_356_676),
    (1025, 2049, 1027),
    (1024, 2048, 1028),
]
# a is in rows, and the transposed matrix [K, N].
ROWS = [(8192, 256, 1024), (8192, 259, 1030), (8195, 1023, 1025), (8200, 4100, 1028)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("sizes", "a_columns"),
    [
        *((sizes, True) for sizes in COLUMNS),
        *(((n, k, m), True) for m, k, n in COLUMNS),
        *((sizes, False) for sizes in ROWS),
    ],
    ids=str,
)
def test_every_element(sizes, a_columns, layout):
    m, k, n = sizes
    a, b = integers(k, m) if a_columns else integers(m, k), integers(k, n)
    takes_b = not a_columns or m >= n
    if takes_b:
        b = LAYOUTS[layout](b)
    else:
        a = LAYOUTS[layout](a)
    a = a.t() if a_columns else a
    oracle.poison("cuda", m * n, k * (min(m, n) + 3))
    c = tf32_matmul(a, b)
    assert c.is_contiguous()
    for part in range(0, n, 2**20):  # in float64 all of it would be large
        some = slice(part, part + 2**20)
        assert torch.equal(c[:, some].double(), a.double() @ b[:, some].double())


def operands(m: int, k: int, n: int, a_columns: bool, b_columns: bool) -> tuple[Tensor, Tensor]:
    a = integers(k, m).t() if a_columns else integers(m, k)
    return a, integers(n, k).t() if b_columns else integers(k, n)


def extra_bytes(a: Tensor, b: Tensor, kind: str) -> int:
    """Allocated beside the result, which has to be right."""
    product.fp32_matmul(a, b, FP32_PRODUCTS[kind])  # cuBLAS allocates its workspace
    torch.cuda.reset_peak_memory_stats()
    c = product.fp32_matmul(a, b, FP32_PRODUCTS[kind])
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert torch.equal(c.double(), a.double() @ b.double())
    return extra


IN_ROWS, IN_COLUMNS = False, True
CHOICE = [  # M, K, N, the operands' order, and whose transpose is made
    ((1024, 2048, 1024), IN_COLUMNS, IN_ROWS, "b"),
    ((1024, 2048, 1025), IN_COLUMNS, IN_ROWS, "a"),  # the smaller one
    ((1025, 2048, 1024), IN_COLUMNS, IN_ROWS, "b"),
    ((1024, 2047, 1024), IN_COLUMNS, IN_ROWS, ""),  # less than 2^31 products
    ((1023, 2100, 1024), IN_COLUMNS, IN_ROWS, ""),  # less than 2^20 outputs
    ((1024, 2048, 1024), IN_COLUMNS, IN_COLUMNS, ""),
    ((8192, 1024, 1024), IN_ROWS, IN_ROWS, "b"),
    ((8191, 1024, 1032), IN_ROWS, IN_ROWS, ""),  # less than 2^13 rows
    ((8192, 1024, 1023), IN_ROWS, IN_ROWS, ""),  # less than 2^23 outputs
    ((8192, 4096, 1024), IN_ROWS, IN_ROWS, "b"),
    ((8192, 4097, 1024), IN_ROWS, IN_ROWS, ""),  # more than half as much K as M
    ((8192, 256, 1024), IN_ROWS, IN_ROWS, "b"),
    ((8192, 255, 1024), IN_ROWS, IN_ROWS, ""),  # less than 2^31 products
    ((8192, 1024, 1024), IN_ROWS, IN_COLUMNS, ""),
]


@pytest.mark.parametrize(("sizes", "a_columns", "b_columns", "transposed"), CHOICE, ids=str)
def test_which_products_take_it(sizes, a_columns, b_columns, transposed):
    """On either side of each threshold, by the memory that it takes."""
    m, k, n = sizes
    a, b = operands(*sizes, a_columns, b_columns)
    extra = extra_bytes(a, b, "tf32")
    # In rows of whole vectors. The allocator rounds, by a MiB at most.
    expected = {"a": m, "b": n, "": 0}[transposed] * (-(-k // 4) * 16)
    assert expected <= extra <= expected + (2**20 + 512 if transposed else 0)
    with fp32_precision(tf32=False):
        assert extra_bytes(a, b, "ieee") == 0


@pytest.mark.parametrize("sizes", [(8192, 1024, 1025), (16384, 4096, 1025)], ids=str)
@pytest.mark.parametrize("a_columns", [False, True], ids=["a in rows", "a in columns"])
def test_is_as_exact_with_it(sizes, a_columns):
    m, k, n = sizes
    a = torch.randn(k, m, device="cuda").t() if a_columns else torch.randn(m, k, device="cuda")
    b = torch.randn(k, n, device="cuda")
    exact = a.double() @ b.double()
    ours, theirs = tf32_matmul(a, b), torch.mm(a, b)
    assert (ours - exact).norm() <= 1.05 * (theirs - exact).norm()


def test_what_is_not_finite_lands_where_torch_puts_it():
    a, b = operands(1024, 2048, 1024, IN_COLUMNS, IN_ROWS)
    a[7, 3], b[5, 9], b[6, 11] = torch.nan, torch.inf, -torch.inf
    a[:, 5:7] = 1.0
    ours, theirs = tf32_matmul(a, b), torch.mm(a, b)
    assert not theirs.isfinite().all()
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("k", [(1 << 20) + 4, (1 << 20) + 3], ids=["in vectors", "without"])
def test_more_than_2_to_the_31_elements(k):
    a, b = operands(2056, k, 2056, IN_COLUMNS, IN_ROWS)
    c, wide = tf32_matmul(a, b), a.double()
    for columns in (slice(0, 64), slice(1000, 1064), slice(2056 - 64, 2056)):
        assert torch.equal(c[:, columns].double(), wide @ b[:, columns].double())
