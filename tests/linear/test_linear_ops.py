"""The registered ops: opcheck, fakes, errors of raw calls. Only the kernels need a GPU.

On the CPU the ops get kernels made of plain PyTorch, so that the registered fakes and autograd
formulas can be checked.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from linear_cases import ACTIVATIONS, BF16, EPS, Case, make_layer, max_error, oracle
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_bn
from cutlass_bn import functional
from cutlass_bn.ops import fp32_products
from cutlass_bn.ops import linear_batch_norm as ops

pytestmark = pytest.mark.skipif(
    not cutlass_bn.library_is_loaded(), reason="the compiled library is not there"
)
CASE = Case(20, 11, 8, "odd N: u has padded rows", activation="gelu")


def _cpu_stats(
    input, weight, bias, scale, running_mean, running_var, counter, momentum, eps, fp32_products
):
    width = 16 // input.element_size()
    row = -(-len(weight) // width) * width
    u = input.new_empty_strided((len(input), len(weight)), (row, 1)).copy_(input @ weight.t())
    var, mean = torch.var_mean(u.double(), 0, correction=0)
    gain = 1.0 if scale is None else scale.double()
    stats = torch.stack(
        [mean.float(), (mean - mean.float()).float(), torch.rsqrt(gain**2 * var + eps).float()]
    )
    counter.add_(1)
    running_mean.lerp_((mean + bias).float() * scale, momentum)
    running_var.lerp_((var * len(u) / (len(u) - 1)).float() * scale**2, momentum)
    return u, stats


def _cpu_transform(
    input, weight, bias, scale, gamma, beta, u, stats, eps, activation, dtype, fp32_products
):
    y = (u - stats[0] - stats[1]) * (stats[2] * scale) * gamma + beta
    return list(ACTIVATIONS.values())[activation](y).to(dtype).clone()


def _cpu_backward(
    grad, u, stats, scale, gamma, beta, eps, activation, u_grad, scale_grad, gamma_grad, beta_grad
):
    mean, remainder, invstd = stats
    centred = (u - mean) - remainder
    normalised = centred * (scale * invstd)
    dv = ops._ACTIVATION_BACKWARDS[activation](grad.float(), normalised * gamma + beta)
    dgamma, dbeta = (dv * normalised).sum(0), dv.sum(0)
    dz = (dv - dbeta / len(u) - normalised * (dgamma / len(u))) * (gamma * invstd)
    dscale = (dv * centred).sum(0) * gamma * eps * invstd**3
    width = 16 // u.element_size()
    du = u.new_empty_strided(u.shape, (-(-u.size(1) // width) * width, 1)).copy_(dz * scale)
    vectors = ((dscale, scale_grad), (dgamma, gamma_grad), (dbeta, beta_grad))
    return (
        du if u_grad else u.new_empty(0),
        *(
            u.new_empty(0, dtype=torch.float32) if dtype is None else t.to(dtype)
            for t, dtype in vectors
        ),
    )


def _cpu_inference(
    input, weight, bias, scale, mean, var, gamma, beta, eps, activation, dtype, fp32_products
):
    y = (scale * (input @ weight.t() + bias) - mean) * torch.rsqrt(var + eps) * gamma + beta
    return list(ACTIVATIONS.values())[activation](y).to(dtype).clone()


@pytest.fixture
def kernels(device):
    if device != "cpu":
        yield
        return
    library = torch.library.Library("cutlass_bn", "IMPL", "CPU")
    for name in ("stats", "transform", "backward", "inference"):
        library.impl(f"linear_batch_norm_{name}", globals()[f"_cpu_{name}"])
    yield
    library._destroy()


def arguments(device, dtype=torch.float32, products=fp32_products.FP32_PRODUCTS["ieee"]):
    """The arguments of each op."""
    layer = make_layer(
        Case(20, 11, 8, "odd N: u has padded rows", dtype, parameter_dtype=dtype), device
    )
    x, w, b, s, mean, var, gamma, beta, *_ = layer.arguments().values()
    u, stats = ops.stats(
        x, w, b, s, mean.clone(), var.clone(), layer.num_batches_tracked.clone(), 0.1, EPS, products
    )
    for t in (x, w, b, s, gamma, beta):
        t.requires_grad_()
    dy = torch.linspace(-1.0, 1.0, u.numel()).view_as(u).to(u)
    vectors = [t.detach() for t in (s, gamma, beta)]
    return {
        "stats": (
            *(t.detach() for t in (x, w, b, s)),
            mean,
            var,
            layer.num_batches_tracked,
            0.1,
            EPS,
            products,
        ),
        "transform": (x, w, b, s, gamma, beta, u, stats, EPS, 2, dtype, products),
        "backward": (dy, u, stats, *vectors, EPS, 2, True, dtype, dtype, dtype),
        "inference": (x, w, b, s, mean, var, gamma, beta, EPS, 2, dtype, products),
    }


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["stats", "transform", "backward", "inference"])
def test_opcheck(name, device):
    op = getattr(torch.ops.cutlass_bn, f"linear_batch_norm_{name}").default
    torch.library.opcheck(op, arguments(device)[name])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_registered_gradients(training, create_graph, device):
    layer = make_layer(CASE, device)
    exact, wide = oracle(layer, training)
    wide = make_layer(CASE, device).double().requires_grad()
    exact = functional.linear_batch_norm(**wide.arguments(), training=training, eps=EPS)
    args = arguments(device)["transform" if training else "inference"]
    y = (ops.transform if training else ops.inference)(*args)
    assert max_error(y, exact) < 1e-5
    dy = torch.randn_like(y)
    leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    found = torch.autograd.grad(y, leaves, dy, create_graph=create_graph)
    expected = torch.autograd.grad(exact, list(wide.differentiable().values()), dy.double())
    for name, ours, theirs in zip(wide.NAMES, found, expected, strict=True):
        assert ours.requires_grad == (create_graph and ours.grad_fn is not None)
        if training and name == "bias":
            assert not ours.any() or create_graph
        elif not (create_graph and training and name == "scale"):  # there the reference cancels
            assert max_error(ours, theirs) < 1e-5, name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("wanted", [*itertools.product([False, True], repeat=4)], ids=str)
def test_backward_gives_what_is_asked_for(wanted, device):
    args = arguments(device)["backward"]
    everything = ops.backward(*args)
    found = ops.backward(*args[:8], wanted[0], *(BF16 if asked else None for asked in wanted[1:]))
    for asked, gradient, expected in zip(wanted, found, everything, strict=True):
        if asked:
            torch.testing.assert_close(
                gradient,
                expected.to(gradient.dtype),
                rtol=1e-5 if gradient is found[0] else 1e-2,
                atol=1e-6,
            )
        else:
            assert gradient.shape == (0,)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("eager", [False, True], ids=["op", "function"])
def test_a_batch_of_gradients(training, eager, device):
    args = arguments(device)["transform" if training else "inference"]
    op = getattr(
        ops, ("differentiable_" if eager else "") + ("transform" if training else "inference")
    )
    y = op(*args)
    leaves = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
    dys = torch.randn(3, *y.shape, device=device)
    batched = torch.autograd.grad(y, leaves, dys, retain_graph=True, is_grads_batched=True)
    for i, dy in enumerate(dys):
        for together, alone in zip(
            batched, torch.autograd.grad(y, leaves, dy, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(together[i], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("products", fp32_products.FP32_PRODUCTS)
@pytest.mark.parametrize("create_graph", [False, True], ids=["backward", "double backward"])
@pytest.mark.parametrize("name", ["transform", "inference"])
def test_backward_keeps_the_products_of_the_forward(
    name, create_graph, products, monkeypatch, device
):
    """On a Hopper GPU, where they are large, all matrix products of the formulas are split."""
    sizes = []

    def split_matmul(a, b):
        assert all(1 in t.stride() for t in (a, b))
        sizes.append((*a.shape, b.size(1)))
        return torch.mm(a, b)

    monkeypatch.setattr(fp32_products, "split_matmul", split_matmul)
    args = arguments(device, products=fp32_products.FP32_PRODUCTS[products])[name]
    m, n, k = CASE.m, CASE.n, CASE.k
    forward, backward = [(m, k, n)], [(n, m, k), (m, n, k)]
    expected = backward if name == "transform" else forward + backward
    if create_graph:  # the reference
        expected = []
    for hopper, smallest, wanted in ((True, k, expected), (True, k + 1, []), (False, k, [])):
        monkeypatch.setattr(fp32_products, "_is_hopper", lambda _, hopper=hopper: hopper)
        monkeypatch.setattr(fp32_products, "_SPLIT_SIZES", (smallest, 0, 0))
        y = getattr(ops, name)(*args)
        torch.autograd.grad(y.sum(), args[:2], create_graph=create_graph)  # an expanded gradient
        assert sizes == (wanted if products == "split" else [])
        sizes.clear()


def test_operands_without_dense_rows_or_columns_are_copied(device):
    dense = torch.rand(6, 8, device=device)
    for taken in (dense, dense.t(), dense[:, 1:5], dense[2:4].t(), dense[:, :1], dense[:1]):
        assert fp32_products._unit_strided(taken) is taken
    for copied in (
        dense[:, ::2],
        dense[:, ::2].t(),
        dense[:1].expand(6, 8),
        dense[:, :1].expand(6, 8),
    ):
        result = fp32_products._unit_strided(copied)
        assert result.is_contiguous()
        assert torch.equal(result, copied)


@pytest.mark.parametrize(("dtype", "stride"), [(torch.float32, 12), (BF16, 16)])
def test_fake_cuda_tensors(dtype, stride):
    """Shapes, strides and dtypes for a CUDA device that this machine need not have."""
    with FakeTensorMode(), torch.no_grad():

        def empty(*shape, dtype=dtype):
            return torch.empty(shape, dtype=dtype, device="cuda")

        x, w, vector = empty(6, 5), empty(11, 5), empty(11, dtype=torch.float32)
        counter = empty(dtype=torch.int64)
        u, stats = ops.stats(x, w, None, vector, vector, vector, counter, None, EPS, 0)
        assert (u.shape, u.stride(), u.dtype) == ((6, 11), (stride, 1), dtype)
        assert (stats.shape, stats.dtype) == ((3, 11), torch.float32)
        for training in (True, False):
            y = functional.linear_batch_norm(x, w, None, vector, vector, vector, training=training)
            assert (y.shape, y.dtype, y.device.type) == ((6, 11), torch.float32, "cuda")
            y = functional.linear_batch_norm(x, w, None, None, vector, vector, training=training)
            assert (y.shape, y.dtype) == ((6, 11), dtype)
        with pytest.raises(RuntimeError, match="weight: expected"):
            ops.stats(x, empty(11, 4), None, None, None, None, None, 0.1, EPS, 0)


ERRORS = {
    "input's rank": (
        "stats",
        0,
        lambda t: t[None],
        "input: expected 2 dimensions, got shape \\[1, 20, 8\\]",
    ),
    "input's dtype": (
        "stats",
        0,
        lambda t: t.double(),
        "input: expected float32, float16 or bfloat16",
    ),
    "one row": ("stats", 0, lambda t: t[:1], "input: expected more than 1 row"),
    "weight's shape": (
        "stats",
        1,
        lambda t: t[:, 1:],
        "weight: expected shape \\[11, 8\\], got \\[11, 7\\]",
    ),
    "weight's dtype": (
        "stats",
        1,
        lambda t: t.half(),
        "weight: expected float32 like input, got float16",
    ),
    "weight's device": (
        "stats",
        1,
        lambda t: t.cpu(),
        "weight: expected a tensor on cuda:0 like input",
    ),
    "bias's shape": ("stats", 2, lambda t: t[1:], "bias: expected shape \\[11\\], got \\[10\\]"),
    "scale's stride": (
        "stats",
        3,
        lambda t: t.repeat_interleave(2)[::2],
        "scale: expected a contiguous tensor",
    ),
    "half of the buffers": (
        "stats",
        4,
        lambda t: None,
        "expected both or neither, got only running_var",
    ),
    "counter's dtype": ("stats", 6, lambda t: t.int(), "num_batches_tracked: expected one int64"),
    "no counter, no momentum": (
        "stats",
        slice(6, 8),
        lambda _: (None, None),
        "momentum: expected a number",
    ),
    "u's shape": ("transform", 6, lambda t: t[1:], "u: expected shape \\[20, 11\\]"),
    "u's dtype": (
        "transform",
        6,
        lambda t: t.half(),
        "u: expected float32 like input, got float16",
    ),
    "u's layout": ("transform", 6, lambda t: t.t().contiguous().t(), "u: expected contiguous rows"),
    "stats' shape": ("transform", 7, lambda t: t[:2], "stats: expected shape \\[3, 11\\]"),
    "stats' dtype": (
        "transform",
        7,
        lambda t: t.half(),
        "stats: expected a contiguous float32 tensor",
    ),
    "activation": ("transform", 9, lambda _: 4, "activation: expected 0"),
    "output's dtype": ("transform", 10, lambda _: torch.float16, "dtype: expected that of input"),
    "code of the products": ("stats", 9, lambda _: 3, "fp32_products: expected 0"),
    "gradient's shape": ("backward", 0, lambda t: t[1:], "grad: expected shape \\[20, 11\\]"),
    "gradient's dtype": (
        "backward",
        0,
        lambda t: t.half(),
        "grad: expected float32 like u or float32, got float16",
    ),
    "gradient's device": ("backward", 0, lambda t: t.cpu(), "grad: expected a tensor on cuda:0"),
    "u's layout in the backward": (
        "backward",
        1,
        lambda t: t.t().contiguous().t(),
        "u: expected contiguous rows",
    ),
    "stats' shape in the backward": (
        "backward",
        2,
        lambda t: t[:2],
        "stats: expected shape \\[3, 11\\]",
    ),
    "scale's shape in the backward": (
        "backward",
        3,
        lambda t: t[1:],
        "scale: expected shape \\[11\\]",
    ),
    "activation in the backward": ("backward", 7, lambda _: 4, "activation: expected 0"),
    "dtype of a gradient": ("backward", 9, lambda _: torch.float64, "scale_grad: expected float32"),
    "running_var's shape": ("inference", 5, lambda t: t[1:], "running_var: expected shape"),
    "beta's dtype": (
        "inference",
        7,
        lambda t: t.double(),
        "beta: expected float32, float16 or bfloat16",
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("mistake", ERRORS)
def test_errors_of_raw_ops(mistake):
    name, index, change, text = ERRORS[mistake]
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
    args = arguments("cuda")
    for padded in (ops.stats(*args["stats"])[0], ops.backward(*args["backward"])[0]):
        assert padded.stride() == (12, 1)
        assert padded.untyped_storage().nbytes() == 20 * 12 * 4
        assert not padded._is_view()


@pytest.mark.gpu
def test_in_place_overlap_is_not_created():
    """y never aliases u, which the backward needs."""
    args = arguments("cuda")["transform"]
    u = args[6].clone()
    y = ops.transform(*args)
    assert y.data_ptr() != args[6].data_ptr()
    assert torch.equal(args[6], u)
