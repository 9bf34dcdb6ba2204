"""fp32_products.transpose_fp32, and the TF32 products of the backward that are made with it."""

from __future__ import annotations

import oracle
import pytest
import torch
from linear_cases import fp32_precision, hopper, max_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cutlass_bn
from cutlass_bn.ops import fp32_products

pytestmark = pytest.mark.skipif(
    not cutlass_bn.library_is_loaded(), reason="the compiled library is not there"
)
TF32 = fp32_products.FP32_PRODUCTS["tf32"]


def padded_transpose(matrix):
    columns, rows = matrix.size(1), matrix.size(0)
    return matrix.new_empty_strided((columns, rows), (-(-rows // 4) * 4, 1)).copy_(matrix.t())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Hides conftest's: the op has a kernel for CUDA alone, and here for the CPU."""
    with torch.library._scoped_library("cutlass_bn", "IMPL") as library:
        if request.param == "cpu":
            library.impl("transpose_fp32", padded_transpose, "CPU")
        yield request.param


def any_bits(*shape: int) -> torch.Tensor:
    """Every float32 there is, NaN with a payload and denormals among them."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int().view(torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [False, True], ids=["whole", "window"])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1),
        (1, 70),
        (70, 1),
        (3, 5),
        (4, 4),
        (63, 65),
        (64, 64),
        (64, 68),
        (128, 192),
        (300, 200),
        (129, 1000),
        (4000, 36),
    ],
    ids=str,
)
def test_bit_for_bit(shape, window):
    rows, columns = shape
    # Rows stay aligned where columns are a multiple of 4.
    around = any_bits(rows + 3, columns + 4).cuda()
    matrix = around[2 : 2 + rows, :columns] if window else around[:rows, :columns].contiguous()
    oracle.poison("cuda", columns * (rows + 3))
    result = fp32_products.transpose_fp32(matrix)
    assert (result.shape, result.stride(), result.dtype) == (
        (columns, rows),
        (-(-rows // 4) * 4, 1),
        torch.float32,
    )
    assert torch.equal(result.view(torch.int32), matrix.t().contiguous().view(torch.int32))


@pytest.mark.gpu
def test_an_address_that_is_aligned_to_nothing():
    base = any_bits(1 + 128 * 64).cuda()
    matrix = base[1:].view(128, 64)
    assert torch.equal(
        fp32_products.transpose_fp32(matrix).view(torch.int32),
        matrix.t().contiguous().view(torch.int32),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_empty(shape):
    assert fp32_products.transpose_fp32(torch.empty(shape, device="cuda")).shape == shape[::-1]


@pytest.mark.gpu
def test_strides_that_no_step_takes():
    """Rows that are all the same one, and the only row of a matrix."""
    row = any_bits(1, 70).cuda()
    for matrix in (row.expand(66, 70), torch.as_strided(row, (1, 68), (3, 1))):
        assert torch.equal(
            fp32_products.transpose_fp32(matrix).view(torch.int32),
            matrix.contiguous().t().contiguous().view(torch.int32),
        )


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    for rows in ((1 << 20) + 4, (1 << 20) + 3):  # in vectors and without
        matrix = torch.empty(rows, 2056, device="cuda").normal_()
        assert torch.equal(fp32_products.transpose_fp32(matrix), matrix.t())


def test_opcheck(device):
    torch.library.opcheck(fp32_products.transpose_fp32, (torch.rand(20, 13, device=device),))
    torch.library.opcheck(
        fp32_products.transpose_fp32, (torch.rand(20, 16, device=device)[:, :12],)
    )


def test_fake_cuda_tensors():
    with FakeTensorMode():
        result = fp32_products.transpose_fp32(torch.empty(6, 11, device="cuda"))
        assert (result.shape, result.stride(), result.device.type) == ((11, 6), (8, 1), "cuda")
        with pytest.raises(RuntimeError, match="matrix: expected float32"):
            fp32_products.transpose_fp32(torch.empty(6, 11, device="cuda", dtype=torch.float16))


MISTAKES = {
    "rank": (lambda t: t[0], "matrix: expected 2 dimensions"),
    "dtype": (lambda t: t.half(), "matrix: expected float32, got float16"),
    "layout": (lambda t: t.t(), "matrix: expected contiguous rows, got a column stride of 12"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors(mistake):
    change, message = MISTAKES[mistake]
    with pytest.raises(RuntimeError, match=message):
        fp32_products.transpose_fp32(change(torch.rand(20, 12, device="cuda")))


A, B = (20, 10), (10, 16)
PRODUCTS = 20 * 10 * 16
ROWS, COLUMNS = False, True


@pytest.mark.parametrize(
    ("a_columns", "b_columns", "changes", "expected"),
    [
        (ROWS, ROWS, {}, [B]),
        (ROWS, ROWS, {"_TRANSPOSE_ROWS": 21}, []),
        (ROWS, ROWS, {"_TRANSPOSE_PRODUCTS": PRODUCTS + 1}, []),
        (COLUMNS, ROWS, {}, [B]),
        (ROWS, ROWS, {"_TRANSPOSE_ROW_OUTPUTS": 20 * 16 + 1}, []),
        (COLUMNS, ROWS, {"_TRANSPOSE_ROWS": 21, "_TRANSPOSE_ROW_OUTPUTS": 20 * 16 + 1}, [B]),
        (COLUMNS, ROWS, {"_TRANSPOSE_OUTPUTS": 20 * 16 + 1}, []),
        (COLUMNS, ROWS, {"b": (10, 24)}, [(10, 20)]),  # a's transpose is the smaller one
        (COLUMNS, ROWS, {"_TRANSPOSE_PRODUCTS": PRODUCTS + 1}, []),
        (ROWS, COLUMNS, {}, []),
        (COLUMNS, COLUMNS, {}, []),
        (ROWS, ROWS, {"a": (20, 11), "b": (11, 16)}, []),  # k long enough for cuBLAS as it is
        (ROWS, ROWS, {"products": "ieee"}, []),
        (ROWS, ROWS, {"hopper": False}, []),
    ],
)
def test_which_products_take_it(a_columns, b_columns, changes, expected, device, monkeypatch):
    """On a Hopper GPU, in TF32, where b has dense rows and the product is large."""
    taken = []

    def transpose(matrix):
        assert matrix.stride(1) == 1
        taken.append(tuple(matrix.shape))
        return matrix.t().contiguous()

    settings = {
        "_TRANSPOSE_PRODUCTS": PRODUCTS,
        "_TRANSPOSE_OUTPUTS": 20 * 16,
        "_TRANSPOSE_ROWS": 20,
        "_TRANSPOSE_ROW_OUTPUTS": 20 * 16,
        "a": A,
        "b": B,
        "products": "tf32",
        "hopper": True,
    }
    settings |= changes
    monkeypatch.setattr(fp32_products, "transpose_fp32", transpose)
    monkeypatch.setattr(fp32_products, "_is_hopper", lambda _: settings["hopper"])
    for name in settings:
        if name.startswith("_TRANSPOSE"):
            monkeypatch.setattr(fp32_products, name, settings[name])

    def operand(shape, columns):
        return (
            torch.rand(shape[::-1], device=device).t()
            if columns
            else torch.rand(shape, device=device)
        )

    a, b = operand(settings["a"], a_columns), operand(settings["b"], b_columns)
    c = fp32_products.matmul(a, b, fp32_products.FP32_PRODUCTS[settings["products"]])
    assert max_error(c, a.double() @ b.double()) < 1e-5
    assert taken == expected


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    ("sizes", "columns", "transposed"),
    [
        ((2048, 1024, 2047), False, []),
        ((8192, 1024, 513), False, []),
        ((8192, 1024, 1025), False, [(1024, 1025)]),
        ((512, 5000, 1025), True, []),
        ((4096, 16384, 1025), True, [(16384, 1025)]),
        ((1024, 5000, 3001), True, [(5000, 1024)]),
    ],
    ids=str,
)
def test_tf32_products_are_as_exact_with_it(sizes, columns, transposed, monkeypatch):
    m, k, n = sizes
    taken, transpose = [], fp32_products.transpose_fp32

    def recorded(matrix):
        taken.append(tuple(matrix.shape))
        return transpose(matrix)

    monkeypatch.setattr(fp32_products, "transpose_fp32", recorded)
    a = torch.randn(k, m, device="cuda").t() if columns else torch.randn(m, k, device="cuda")
    b = torch.randn(k, n, device="cuda")
    exact = a.double() @ b.double()
    with fp32_precision(tf32=True):
        ours, theirs = fp32_products.matmul(a, b, TF32), torch.mm(a, b)
    assert taken == transposed
    assert (ours - exact).norm() <= 1.05 * (theirs - exact).norm()


def test_products_of_a_size_unknown_while_traced(monkeypatch):
    """The rules take what can't be known as not so, and ask for no value."""
    monkeypatch.setattr(fp32_products, "_is_hopper", lambda _: True)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        size = mode.shape_env.create_unbacked_symint()
        torch._check(size >= 0)
        du = torch.empty(size, 32, device="cuda")
        for x in (torch.empty(size, 64, device="cuda"), torch.empty(64, size, device="cuda").t()):
            for code in fp32_products.FP32_PRODUCTS.values():
                assert fp32_products.matmul(du.t(), x, code).shape == (32, 64)


def test_a_batch_of_products(device, monkeypatch):
    monkeypatch.setattr(fp32_products, "_is_hopper", lambda _: True)
    monkeypatch.setattr(fp32_products, "_TRANSPOSE_PRODUCTS", 1)
    dus, x = torch.rand(3, 9, 5, device=device), torch.rand(9, 7, device=device)
    dws = torch.func.vmap(lambda du: fp32_products.matmul(du.t(), x, TF32))(dus)
    assert max_error(dws, dus.double().mT @ x.double()) < 1e-5
