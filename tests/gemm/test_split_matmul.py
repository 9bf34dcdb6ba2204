"""split_fp32 and split_matmul: bits, accuracy beside cuBLAS's, Inf and NaN, gradients, errors.

On the CPU the ops get kernels made of plain PyTorch, so that the registered fakes and autograd
formulas can be checked.
"""

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
    left_to_exact_kernel,
    normal,
    spanning,
    split_reference,
    times,
    uniform,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_bn
from cutlass_bn.ops import fp32_products

pytestmark = pytest.mark.skipif(
    not cutlass_bn.library_is_loaded(), reason="the compiled library is not there"
)
on_hopper = [pytest.mark.gpu, hopper]
COLUMNS = pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_hopper)])
def device(request):
    """Hides conftest's: these ops have kernels for Hopper alone, and here for the CPU."""
    with torch.library._scoped_library("cutlass_bn", "IMPL") as library:
        if request.param == "cpu":
            library.impl("split_fp32", split_reference, "CPU")
            library.impl("split_matmul", padded_mm, "CPU")
        yield request.param


def padded_mm(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty_strided((len(a), b.size(1)), (-(-b.size(1) // 4) * 4, 1)).copy_(a @ b)


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
    return fp32_products.split_matmul(x, w.t())


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
    "infinity": lambda k: normal(1, k, "cpu").index_fill_(1, torch.tensor(k // 2), -torch.inf),
    "NaN": lambda k: normal(1, k, "cpu").index_fill_(1, torch.tensor(k - 1), torch.nan),
}


@COLUMNS
@pytest.mark.parametrize("transposed", [False, True], ids=["as it is", "transposed"])
@pytest.mark.parametrize("k", [1, 3, 8, 33, 257, 1024, 4099, 65537])
def test_split_bit_for_bit(k, transposed, columns, device):
    """A row of each kind, and as many again that a tile of rows is left over."""
    rows = torch.cat([row(k) for row in ROWS.values()] * (3 if k < 5000 else 1))
    expected = [t.to(device) for t in split_reference(rows)]
    matrix = stored((rows.t() if transposed else rows).to(device), columns)
    oracle.poison(device, *(-(-t.numel() * t.element_size() // 4) for t in expected))
    for _ in range(2):
        for name, ours, theirs in zip(
            NAMES, fp32_products.split_fp32(matrix, transposed), expected, strict=True
        ):
            assert torch.equal(ours, theirs), name


NAMES = ("planes", "exponents", "census")
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
def test_any_size_and_order(sizes, a_columns, b_columns, device):
    m, n, k = sizes
    x, w = normal(m, k, device), normal(n, k, device)
    a, b = stored(x, a_columns), stored(w.t(), b_columns)
    oracle.poison(device, m * n)
    c = fp32_products.split_matmul(a, b)
    assert (c.shape, c.dtype) == ((m, n), torch.float32)
    assert c.stride() == (-(-n // 4) * 4, 1)
    assert excess(c, x, w, extra=8) <= 1
    assert torch.equal(fp32_products.split_matmul(a, b), c)


@pytest.mark.gpu
@hopper
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
    plain_sums = left_to_exact_kernel(
        *(fp32_products.split_fp32(t, False)[2] for t in (x, w)), k
    ).any()
    for name, error in ours.items():
        allowed = (2.0 if plain_sums else 1.0) * max(theirs[name], UNIT)
        assert error <= allowed, f"{name}: {error:.3g}, SGEMM's {theirs[name]:.3g}"


@pytest.mark.gpu
@hopper
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


@pytest.mark.gpu
@hopper
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


def test_a_padded_result_is_no_view(device):
    """Autograd would forbid to change it in place."""
    a, b = normal(20, 12, device), normal(12, 9, device).requires_grad_()
    c = fp32_products.split_matmul(a, b)
    assert not c._is_view()
    c.add_(1.0)
    c.sum().backward()
    assert max_error(b.grad, a.double().sum(0)[:, None].expand(12, 9)) < 1e-5


def test_opcheck(device):
    a, b = normal(20, 12, device), normal(12, 9, device)
    torch.library.opcheck(fp32_products.split_fp32, (a, False))
    torch.library.opcheck(fp32_products.split_fp32, (a.t(), True))
    torch.library.opcheck(
        fp32_products.split_matmul, (a.requires_grad_(), b.t().contiguous().t().requires_grad_())
    )
    torch.library.opcheck(fp32_products.split_matmul, (a.detach(), b))


@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)], ids=str)
def test_gradients(wanted, device):
    """First and second, of gradients that are expanded as well."""
    operands = [normal(33, 17, device), normal(17, 20, device)]

    def gradients(function, dtype) -> list[Tensor]:
        tensors = [t.to(dtype) for t in operands]
        leaves = [tensors[i].requires_grad_() for i in wanted]
        c = function(*tensors)
        first = torch.autograd.grad(c.sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)
        return [*torch.autograd.grad(function(*tensors).sum(), leaves), *first, *second]

    ours, exact = (
        gradients(fp32_products.split_matmul, torch.float32),
        gradients(torch.mm, torch.float64),
    )
    for actual, expected in zip(ours, exact, strict=True):
        assert max_error(actual, expected) < 1e-5


def test_batched_gradients(device):
    a, b = normal(6, 5, device).requires_grad_(), normal(5, 4, device)
    directions = torch.randn(3, 6, 4, device=device)
    (da,) = torch.autograd.grad(
        fp32_products.split_matmul(a, b), a, directions, is_grads_batched=True
    )
    assert max_error(da, directions.double() @ b.double().t()) < 1e-6


@pytest.mark.parametrize("transposed", [False, True])
def test_fake_cuda_tensors(transposed):
    with FakeTensorMode():
        a, b = torch.empty(5, 13, device="cuda"), torch.empty(13, 7, device="cuda")
        planes, *codes = fp32_products.split_fp32(a, transposed)
        rows, width = (13, 8) if transposed else (5, 16)
        assert (planes.shape, planes.dtype, planes.is_contiguous()) == (
            (2, rows, width),
            torch.float16,
            True,
        )
        assert [(code.shape, code.dtype) for code in codes] == [((rows,), torch.int32)] * 2
        c = fp32_products.split_matmul(a, b)
        assert (c.shape, c.stride(), c.dtype, c.device.type) == (
            (5, 7),
            (8, 1),
            torch.float32,
            "cuda",
        )
        with pytest.raises(RuntimeError, match=r"b: expected shape \[5, N\], got \[13, 7\]"):
            fp32_products.split_matmul(a.t(), b)
        with pytest.raises(RuntimeError, match="matrix: expected float32"):
            fp32_products.split_fp32(a.half(), transposed)


MISTAKES = {
    "a's rank": (0, lambda t: t[None], "a: expected 2 dimensions"),
    "b's rank": (1, lambda t: t[0], "b: expected 2 dimensions"),
    "a's dtype": (0, lambda t: t.half(), "a: expected float32"),
    "b's dtype": (1, lambda t: t.double(), "b: expected float32"),
    "a's device": (0, lambda t: t.cpu(), "a: expected a CUDA tensor"),
    "b's device": (1, lambda t: t.cpu(), "b: expected a tensor on cuda:0"),
    "a's layout": (
        0,
        lambda t: t.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
        "a: expected",
    ),
    "b's layout": (1, lambda t: t[:1, :1].expand_as(t), "b: expected"),
    "inner sizes": (1, lambda t: t[1:], "b: expected shape"),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors_of_the_product(mistake):
    index, change, message = MISTAKES[mistake]
    operands = [normal(20, 12, "cuda"), normal(12, 9, "cuda")]
    operands[index] = change(operands[index])
    with pytest.raises(RuntimeError, match=message):
        fp32_products.split_matmul(*operands)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "change",
    [lambda t: t[0], lambda t: t.bfloat16(), lambda t: t[::2, ::2], lambda t: t[:1].expand_as(t)],
    ids=["rank", "dtype", "strides", "overlap"],
)
def test_errors_of_the_split(change):
    with pytest.raises(RuntimeError, match="matrix: expected"):
        fp32_products.split_fp32(change(normal(20, 12, "cuda")), False)


@pytest.mark.gpu
@hopper
def test_cuda_graph():
    """A replay sees new values, rows that need plain sums among them, and gives the same bits."""
    x, w = normal(700, 1000, "cuda"), spanning(60)(300, 1000, "cuda")
    split(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        u = split(x, w)
    for values in (normal, spanning(60), normal):
        x.copy_(values(700, 1000, "cuda"))
        plain_sums = left_to_exact_kernel(
            *(fp32_products.split_fp32(t, False)[2] for t in (x, w)), 1000
        ).any()
        assert plain_sums == (values is not normal)
        graph.replay()
        assert torch.equal(u, split(x, w))
        assert max_error(u, exact_product(x, w)) < 1e-6


@pytest.mark.gpu
@hopper
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
    c = fp32_products.split_matmul(a, b)
    workspace = torch.cuda.max_memory_allocated() - before - c.untyped_storage().nbytes()
    block = 2**28 if k == 65_536 else 2**27
    assert workspace <= 4 * min(m, n) * (k + 8) + block + 32 * (m + n) + 2**20
    assert excess(c, x, w, extra=8) <= 1


@pytest.mark.gpu
@hopper
@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """In the input, and then in the output."""
    for m, n, k in (((1 << 20) + 3, 8, 2056), ((1 << 19) + 3, 4104, 16)):
        x, w = normal(m, k, "cuda"), normal(n, k, "cuda")
        u = split(x, w)
        for rows in (slice(0, 300), slice(m - 300, m)):
            assert excess(u[rows], x[rows], w, extra=8) <= 1
