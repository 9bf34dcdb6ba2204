"""The registered ops: opcheck, fakes, errors of raw calls. Only the kernels need a GPU.

On the CPU the ops get cutlass_bn.cpu's functions as kernels, so that the registered fakes and
autograd formulas can be checked.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from linear_cases import (
    BF16,
    EPS,
    Case,
    fp32_precision,
    hopper,
    make_layer,
    max_error,
    oracle,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_bn
from cutlass_bn import cpu, functional
from cutlass_bn._activations import CODES
from cutlass_bn.ops import linear_batch_norm as ops
from cutlass_bn.ops import product
from cutlass_bn.ops.product import FP32_PRODUCTS

pytestmark = pytest.mark.skipif(
    not cutlass_bn.library_is_loaded(), reason="the compiled library is not there"
)
CASE = Case(20, 11, 8, "odd N: u has padded rows", activation="gelu")


def _cpu_training(*args):
    y, u, stats = cpu.linear_batch_norm_training(*args)
    width = 16 // u.element_size()
    padded = u.new_empty_strided(u.shape, (-(-u.size(1) // width) * width, 1))
    return y, padded.copy_(u), stats


CPU_KERNELS = {
    "training": _cpu_training,
    "backward": cpu.linear_batch_norm_backward,
    "inference": cpu.linear_batch_norm_inference,
}


@pytest.fixture
def kernels(device):
    with torch.library._scoped_library("cutlass_bn", "IMPL") as library:
        if device == "cpu":
            for name, kernel in CPU_KERNELS.items():
                library.impl(f"linear_batch_norm_{name}", kernel, "CPU")
        yield


def arguments(device, dtype=torch.float32, products="ieee", case=CASE):
    """The arguments of each op."""
    layer = make_layer(Case(case.m, case.n, case.k, "", dtype, parameter_dtype=dtype), device)
    x, w, b, s, mean, var, gamma, beta, *_ = layer.arguments().values()
    how = EPS, CODES[case.activation]
    last = *how, dtype, FP32_PRODUCTS[products]
    buffers = mean, var, layer.num_batches_tracked
    _, u, stats = ops.training(x, w, b, s, *(t.clone() for t in buffers), gamma, beta, 0.1, *last)
    for t in (x, w, b, s, gamma, beta):
        t.requires_grad_()
    dy = torch.linspace(-1.0, 1.0, u.numel()).view_as(u).to(u)
    known = [t.detach() for t in (dy, x, w, u, stats, s, gamma, beta)]
    asked = True, True, dtype, dtype, dtype, dtype
    return {
        "training": (x, w, b, s, *buffers, gamma, beta, 0.1, *last),
        "backward": (*known, *how, FP32_PRODUCTS[products], *asked),
        "inference": (x, w, b, s, mean, var, gamma, beta, *last),
    }


def forward(name, args):
    """y of an op."""
    return ops.inference(*args) if name == "inference" else ops.training(*args)[0]


FORWARDS = pytest.mark.parametrize("name", ["training", "inference"])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["training", "backward", "inference"])
def test_opcheck(name, device):
    op = getattr(torch.ops.cutlass_bn, f"linear_batch_norm_{name}").default
    # test_schema objects to the stand-ins for the kernels: they are Python, and it looks inside.
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    utils = ("test_schema", *utils) if device == "cuda" else utils
    args = arguments(device)[name]
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in args]
    for given in (detached, args):
        torch.library.opcheck(op, tuple(given), test_utils=utils)


@pytest.mark.usefixtures("kernels")
@FORWARDS
@pytest.mark.parametrize("create_graph", [True, False])
def test_registered_gradients(name, create_graph, device):
    training = name == "training"
    wide = make_layer(CASE, device).double().requires_grad()
    exact = functional.linear_batch_norm(**wide.arguments(), training=training, eps=EPS)
    args = arguments(device)[name]
    y = forward(name, args)
    assert max_error(y, exact) < 1e-5
    dy = torch.randn_like(y)
    leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    found = torch.autograd.grad(y, leaves, dy, create_graph=create_graph)
    expected = torch.autograd.grad(exact, list(wide.differentiable().values()), dy.double())
    for leaf, ours, theirs in zip(wide.NAMES, found, expected, strict=True):
        assert ours.requires_grad == (create_graph and ours.grad_fn is not None)
        if training and leaf == "bias":
            assert not ours.any() or create_graph
        elif not (create_graph and training and leaf == "scale"):  # there the reference cancels
            assert max_error(ours, theirs) < 1e-5, leaf


@pytest.mark.usefixtures("kernels")
def test_the_op_updates_the_running_statistics(device):
    args = arguments(device)["training"]
    _, wide = oracle(make_layer(CASE, device), True)
    forward("training", args)
    assert max_error(args[4], wide.running_mean) < 1e-6
    assert max_error(args[5], wide.running_var) < 1e-6
    assert args[6] == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("wanted", [*itertools.product([False, True], repeat=6)], ids=str)
def test_backward_gives_what_is_asked_for(wanted, device):
    args = arguments(device)["backward"]
    everything = ops.backward(*args)
    dtypes = (BF16 if asked else None for asked in wanted[2:])
    found = ops.backward(*args[:-6], *wanted[:2], *dtypes)
    assert not everything[2].any()  # bias cancels
    for asked, gradient, expected in zip(wanted, found, everything, strict=True):
        if asked:
            rtol = 1e-5 if gradient.dim() == 2 else 1e-2
            expected = expected.to(gradient.dtype)
            torch.testing.assert_close(gradient, expected, rtol=rtol, atol=1e-6)
        else:
            assert gradient.shape == (0,)


@pytest.mark.usefixtures("kernels")
@FORWARDS
@pytest.mark.parametrize("eager", [False, True], ids=["op", "function"])
def test_a_batch_of_gradients(name, eager, device):
    args = arguments(device)[name]
    y = getattr(ops.CUDA, name).differentiable(*args) if eager else forward(name, args)
    leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    dys = torch.randn(3, *y.shape, device=device)
    batched = torch.autograd.grad(y, leaves, dys, retain_graph=True, is_grads_batched=True)
    for i, dy in enumerate(dys):
        for together, alone in zip(
            batched, torch.autograd.grad(y, leaves, dy, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(together[i], alone, rtol=1e-5, atol=1e-5)


# Products that csrc/linear_bn/policy.cpp has split, and of which it has one operand transposed.
LARGE = Case(2048, 1024, 1024, "", activation="gelu")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("products", FP32_PRODUCTS)
def test_backward_keeps_the_products_of_the_forward(products):
    """By their bits. The gradient of u comes by way of a weight that is the identity."""
    with fp32_precision(tf32=products == "tf32"):
        args = list(arguments("cuda", products=products, case=LARGE)["backward"])
        dx, dw, *_ = ops.backward(*args)
        x, w = args[1:3]
        with fp32_precision(tf32=False):
            identity = torch.eye(LARGE.n, device="cuda")
            same = *args[3:10], FP32_PRODUCTS["ieee"], *args[11:]
            du = ops.backward(args[0], x, identity, *same)[0]
        code = FP32_PRODUCTS[products]
        assert torch.equal(dx, product.fp32_matmul(du, w, code))
        assert torch.equal(dw, product.fp32_matmul(du.t(), x, code))
        assert torch.equal(dx, du @ w) == (products != "split")
        error = max_error(dw, du.double().t() @ x.double())
    assert (error > 2e-5) == (products == "tf32"), error


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("products", FP32_PRODUCTS)
@pytest.mark.parametrize("create_graph", [False, True], ids=["backward", "double backward"])
def test_products_of_the_eval_backward(create_graph, products, monkeypatch):
    """Made as those of the forward; of none where the definition takes over."""
    args = arguments("cuda", products=products)["inference"]
    y, made, original = ops.inference(*args), [], product.fp32_matmul

    def recorded(a, b, code):
        made.append((*a.shape, b.size(1), code))
        return original(a, b, code)

    monkeypatch.setattr(product, "fp32_matmul", recorded)
    torch.autograd.grad(y.sum(), args[:2], create_graph=create_graph)  # an expanded gradient
    m, n, k, code = CASE.m, CASE.n, CASE.k, FP32_PRODUCTS[products]
    expected = [(m, k, n, code), (n, m, k, code), (m, n, k, code)]
    assert made == ([] if create_graph else expected)


@pytest.mark.parametrize(("dtype", "stride"), [(torch.float32, 12), (BF16, 16)])
def test_fake_cuda_tensors(dtype, stride):
    """Shapes, strides and dtypes for a CUDA device that this machine need not have."""
    with FakeTensorMode(), torch.no_grad():

        def empty(*shape, dtype=dtype):
            return torch.empty(shape, dtype=dtype, device="cuda")

        x, w, vector = empty(6, 5), empty(11, 5), empty(11, dtype=torch.float32)
        counter = empty(dtype=torch.int64)
        buffers, how = (vector, vector, counter), (None, EPS, 0, torch.float32, 0)
        y, u, stats = ops.training(x, w, None, vector, *buffers, vector, None, *how)
        assert (y.shape, y.stride(), y.dtype) == ((6, 11), (11, 1), torch.float32)
        assert (u.shape, u.stride(), u.dtype) == ((6, 11), (stride, 1), dtype)
        assert (stats.shape, stats.dtype) == ((3, 11), torch.float32)
        for training in (True, False):
            y = functional.linear_batch_norm(x, w, None, vector, vector, vector, training=training)
            assert (y.shape, y.dtype, y.device.type) == ((6, 11), torch.float32, "cuda")
            y = functional.linear_batch_norm(x, w, None, None, vector, vector, training=training)
            assert (y.shape, y.dtype) == ((6, 11), dtype)
        dx, dw, *vectors = ops.backward(
            y, x, w, u, stats, vector, None, None, EPS, 0, 0, True, True, dtype, None, BF16, None
        )
        assert (dx.shape, dx.stride(), dx.dtype) == ((6, 5), (5, 1), dtype)
        assert (dw.shape, dw.stride(), dw.dtype) == ((11, 5), (5, 1), dtype)
        assert [tuple(t.shape) for t in vectors] == [(11,), (0,), (11,), (0,)]
        assert (vectors[0].dtype, vectors[2].dtype) == (dtype, BF16)
        with pytest.raises(RuntimeError, match="weight: expected"):
            ops.training(x, empty(11, 4), *(None,) * 7, 0.1, EPS, 0, dtype, 0)


def spread(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2)[::2]


def columns(t: torch.Tensor) -> torch.Tensor:
    return t.t().contiguous().t()


DTYPES = "expected float32, float16 or bfloat16"
ERRORS = {  # which argument, how it is changed, and what is said
    "training": [
        (0, lambda t: t[None], r"input: expected 2 dimensions, got shape \[1, 20, 8\]"),
        (0, lambda t: t.double(), f"input: {DTYPES}"),
        (0, lambda t: t[:1], "input: expected more than 1 row"),
        (1, lambda t: t[:, 1:], r"weight: expected shape \[11, 8\], got \[11, 7\]"),
        (1, lambda t: t.half(), "weight: expected float32 like input, got float16"),
        (1, lambda t: t.cpu(), "weight: expected a tensor on cuda:0 like input"),
        (2, lambda t: t[1:], r"bias: expected shape \[11\], got \[10\]"),
        (3, spread, "scale: expected a contiguous tensor"),
        (4, lambda t: None, "expected both or neither, got only running_var"),
        (4, spread, "running_mean: expected a contiguous tensor"),
        (6, lambda t: t.int(), "num_batches_tracked: expected one int64"),
        (slice(6, 10, 3), lambda _: (None, None), "momentum: expected a number"),
        (7, lambda t: t[1:], r"gamma: expected shape \[11\]"),
        (8, lambda t: t.cpu(), "beta: expected a tensor on cuda:0"),
        (11, lambda _: 5, "activation: expected 0"),
        (12, lambda _: torch.float16, "dtype: expected that of input"),
        (13, lambda _: 3, "fp32_products: expected 0"),
    ],
    "backward": [
        (0, lambda t: t[1:], r"grad: expected shape \[20, 11\]"),
        (0, lambda t: t.half(), "grad: expected float32 like u or float32, got float16"),
        (0, lambda t: t.cpu(), "grad: expected a tensor on cuda:0"),
        (1, lambda t: t[:, :, None], "input: expected 2 dimensions"),
        (1, lambda t: t[1:], r"input: expected shape \[20, 8\], got \[19, 8\]"),
        (2, lambda t: t[:, 1:], r"weight: expected shape \[11, 8\], got \[11, 7\]"),
        (2, lambda t: t.half(), "weight: expected float32 like u, got float16"),
        (3, lambda t: t[1:], r"input: expected shape \[19, 8\], got \[20, 8\]"),
        (3, lambda t: t.half(), "input: expected float16 like u, got float32"),
        (3, columns, "u: expected contiguous rows"),
        (4, lambda t: t[:2], r"stats: expected shape \[3, 11\]"),
        (4, lambda t: t.half(), "stats: expected a contiguous float32 tensor"),
        (5, lambda t: t[1:], r"scale: expected shape \[11\]"),
        (9, lambda _: 5, "activation: expected 0"),
        (10, lambda _: 3, "fp32_products: expected 0"),
        (14, lambda _: torch.float64, "dtype of a gradient: expected float32"),
    ],
    "inference": [
        (5, lambda t: t[1:], "running_var: expected shape"),
        (7, lambda t: t.double(), f"beta: {DTYPES}"),
        (9, lambda _: -1, "activation: expected 0"),
    ],
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "index", "change", "text"),
    [(name, *error) for name, errors in ERRORS.items() for error in errors],
)
def test_errors_of_raw_ops(name, index, change, text):
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments("cuda")[name]]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    wrong = list(args)
    wrong[index] = change(args[index])
    with pytest.raises(RuntimeError, match=text):
        getattr(torch.ops.cutlass_bn, f"linear_batch_norm_{name}").default(*wrong)
    for now, then in zip(args, before, strict=True):
        assert torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then


@pytest.mark.gpu
def test_padded_rows_are_whole():
    """cuBLAS may read a matrix to the end of its last row's padding."""
    _, u, _ = ops.training(*arguments("cuda")["training"])
    assert u.stride() == (12, 1)
    assert u.untyped_storage().nbytes() == 20 * 12 * 4
    assert not u._is_view()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [0, 2])
def test_outputs_share_no_memory(activation):
    """y never aliases u, which the backward needs."""
    args = list(arguments("cuda")["training"])
    args[11] = activation
    y, u, stats = ops.training(*args)
    assert len({t.untyped_storage().data_ptr() for t in (y, u, stats)}) == 3
