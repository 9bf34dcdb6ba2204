"""The op fp32_matmul: which products are split, what it copies, registration, errors.

On the CPU it gets a kernel of plain PyTorch, so that what is registered with it can be checked.
"""

from __future__ import annotations

import pytest
import torch
from linear_cases import hopper, max_error
from split_cases import normal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cutlass_bn import library_is_loaded
from cutlass_bn.ops import product
from cutlass_bn.ops.product import FP32_PRODUCTS

pytestmark = pytest.mark.skipif(not library_is_loaded(), reason="needs the compiled library")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, hopper])])
def device(request):
    """Hides conftest's: the op has kernels for CUDA alone, and here for the CPU."""
    with torch.library._scoped_library("cutlass_bn", "IMPL") as library:
        if request.param == "cpu":
            library.impl("fp32_matmul", lambda a, b, *_: (a @ b).contiguous(), "CPU")
        yield request.param


def split_matmul(a: Tensor, b: Tensor) -> Tensor:
    return product.fp32_matmul(a, b, FP32_PRODUCTS["split"], True)


COPIED = {
    "strided": lambda t: t.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    "a row, expanded": lambda t: t[:1].expand_as(t),
    "a column, expanded": lambda t: t[:, :1].expand_as(t),
    "a number, expanded": lambda t: t[:1, :1].expand_as(t),
    "rows that overlap": lambda t: torch.as_strided(t, t.shape, (3, 1)),
}


@pytest.mark.parametrize("which", [0, 1], ids=["a", "b"])
@pytest.mark.parametrize("layout", COPIED)
def test_operands_without_dense_rows_or_columns_are_copied(layout, which, device):
    dense = [normal(70, 201, device), normal(201, 136, device)]
    operands = list(dense)
    operands[which] = COPIED[layout](dense[which])
    dense[which] = operands[which].clone(memory_format=torch.contiguous_format)
    assert torch.equal(split_matmul(*operands), split_matmul(*dense))


PAYS = {  # M, K, N: whether a product is split of itself
    (512, 512, 1024): True,
    (1024, 512, 1024): True,
    (725, 513, 727): True,
    (511, 512, 1028): False,  # one of the sizes below 512
    (1024, 511, 1024): False,
    (2048, 512, 511): False,
    (720, 1024, 728): False,  # less than 2^19 outputs
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("a_columns", [False, True], ids=["a in rows", "a in columns"])
@pytest.mark.parametrize("sizes", PAYS, ids=str)
def test_what_is_split(sizes, a_columns):
    """On either side of each threshold, by the bits: the split's, or those of torch.mm."""
    m, k, n = sizes
    a = normal(k, m, "cuda").t() if a_columns else normal(m, k, "cuda")
    b = normal(k, n, "cuda")
    plain, split = torch.mm(a, b), split_matmul(a, b)
    assert not torch.equal(plain, split)
    found = product.fp32_matmul(a, b, FP32_PRODUCTS["split"])
    assert torch.equal(found, split if PAYS[sizes] else plain)
    assert torch.equal(product.fp32_matmul(a, b, FP32_PRODUCTS["ieee"]), plain)


@pytest.mark.parametrize("kind", FP32_PRODUCTS)
def test_opcheck(kind, device):
    a, b = normal(20, 12, device), normal(12, 9, device)
    code = FP32_PRODUCTS[kind]
    torch.library.opcheck(product.fp32_matmul, (a, b.t().contiguous().t(), code))
    torch.library.opcheck(product.fp32_matmul, (a, b, code, True))


@pytest.mark.parametrize("kind", FP32_PRODUCTS)
@pytest.mark.parametrize("always_split", [False, True])
def test_a_batch_of_products(always_split, kind, device):
    dus, x = torch.rand(3, 9, 5, device=device), torch.rand(9, 7, device=device)

    def dw(du: Tensor) -> Tensor:
        return product.fp32_matmul(du.t(), x, FP32_PRODUCTS[kind], always_split)

    assert max_error(torch.func.vmap(dw)(dus), dus.double().mT @ x.double()) < 1e-6


def test_fake_cuda_tensors():
    with FakeTensorMode():
        a, b = torch.empty(5, 13, device="cuda"), torch.empty(13, 7, device="cuda")
        for taken in (b, torch.empty(7, 13, device="cuda").t()):
            c = split_matmul(a, taken)
            assert (c.shape, c.stride(), c.dtype) == ((5, 7), (7, 1), torch.float32)
            assert c.device.type == "cuda"
        with pytest.raises(RuntimeError, match=r"b: expected shape \[5, N\], got \[13, 7\]"):
            split_matmul(a.t(), b)
        with pytest.raises(RuntimeError, match="expected float32"):
            split_matmul(a.half(), b)


def test_products_of_a_size_unknown_while_traced():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        size = mode.shape_env.create_unbacked_symint()
        torch._check(size >= 0)
        du = torch.empty(size, 32, device="cuda")
        for x in (torch.empty(size, 64, device="cuda"), torch.empty(64, size, device="cuda").t()):
            for code in FP32_PRODUCTS.values():
                assert product.matmul(du.t(), x, code).shape == (32, 64)


MISTAKES = {
    "a's rank": (0, lambda t: t[None], "a: expected 2 dimensions"),
    "b's rank": (1, lambda t: t[0], "b: expected 2 dimensions"),
    "a's dtype": (0, lambda t: t.half(), "a: expected float32"),
    "b's dtype": (1, lambda t: t.double(), "b: expected float32"),
    "a's device": (0, lambda t: t.cpu(), "a: expected a CUDA tensor"),
    "b's device": (1, lambda t: t.cpu(), "b: expected a tensor on cuda:0"),
    "inner sizes": (1, lambda t: t[1:], r"b: expected shape \[12, N\], got \[11, 9\]"),
    "code of the products": (2, lambda _: 3, "fp32_products: expected 0"),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("always_split", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_errors(mistake, always_split):
    index, change, message = MISTAKES[mistake]
    arguments = [normal(20, 12, "cuda"), normal(12, 9, "cuda"), FP32_PRODUCTS["split"]]
    arguments[index] = change(arguments[index])
    with pytest.raises(RuntimeError, match=message):
        product.fp32_matmul(*arguments, always_split)
