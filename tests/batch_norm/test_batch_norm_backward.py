"""The backward kernels: errors, layouts, bits, and what is launched for what."""

from __future__ import annotations

from dataclasses import dataclass

import oracle
import pytest
import torch
import torch.nn.functional as F
from batch_norm_cases import Case
from torch import Tensor

from cutlass_bn import BatchNorm2d
from cutlass_bn.functional import batch_norm
from cutlass_bn.ops import batch_norm as ops

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])


CASES = [
    Case((4, 16, 56, 56), "a usual layer"),
    Case((4, 16, 56, 56), "a usual layer in bf16", BF16),
    Case((4, 16, 56, 56), "a usual layer in fp16", F16),
    Case((4, 64, 28, 28), "channels last", channels_last=True),
    Case((4, 64, 28, 28), "channels last in bf16", BF16, channels_last=True),
    Case((4, 64, 28, 28), "channels last in fp16", F16, channels_last=True),
    Case((3, 5, 33, 31), "odd planes"),
    Case((3, 5, 33, 31), "odd planes in bf16", BF16),
    Case((3, 5, 33, 31), "odd planes channels last", channels_last=True),
    Case((3, 7, 13, 24), "several planes in a block in fp16", F16),
    Case((2, 7, 16, 17), "planes just too large for the column kernels"),
    Case((2, 7, 16, 16), "planes just small enough for the column kernels"),
    Case((8, 256, 7, 7), "small odd planes in vectors"),
    Case((8, 250, 7, 7), "small odd planes with channels missing in the last block", BF16),
    Case((3, 3, 7, 7), "small odd planes without vectors"),
    Case((1, 3, 17, 19), "a single sample"),
    Case((1, 8, 20, 20), "a single sample channels last", channels_last=True),
    Case((6, 1, 40, 40), "one channel"),
    Case((6, 1, 40, 40), "one channel in fp16 channels last", F16, channels_last=True),
    Case((64, 136, 1, 1), "one element and a second column block almost empty"),
    Case((2, 2, 300, 300), "several tiles per channel"),
    Case((400, 2, 9, 9), "several tiles per channel in the column kernels"),
    Case((300, 16, 30, 30), "several tiles per channel channels last", channels_last=True),
    Case((2, 600, 3, 3), "blocks side by side", F16, channels_last=True),
    Case((33, 96), "two dimensions"),
    Case((2, 6, 3, 5, 7), "five dimensions"),
    Case((4, 8, 24, 24), "misaligned storage", offset=1),
    Case(
        (4, 8, 24, 24),
        "misaligned storage in fp16 channels last",
        F16,
        channels_last=True,
        offset=3,
    ),
    Case((4, 8, 32, 32), "mean far from zero", mean=1e4, std=1.0),
    Case(
        (4, 8, 32, 32), "mean far below zero channels last", mean=-1e4, std=1.0, channels_last=True
    ),
    Case((4, 64, 7, 7), "mean far from zero in small planes", mean=1e4, std=1.0),
    Case((4, 8, 16, 16), "without weight and bias", affine=False),
    Case((4, 300, 20, 20), "more channels than are on chip at a time"),
    Case((5, 7, 12, 43), "planes of two pieces that differ"),
    Case((1, 2, 108, 461), "a last piece of less than a vector a lane"),
    Case((48, 1, 96, 96), "one channel over many blocks"),
    Case((16, 24, 64, 64), "several blocks a channel in bf16", BF16),
    Case((16, 24, 64, 64), "several blocks a channel in fp16", F16),
    Case((16, 6, 64, 64), "mean far from zero over several blocks", mean=1e4, std=1.0),
    Case((2, 70000, 1, 2), "more channels than a grid dimension has blocks"),
]


@dataclass
class Layer:
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor
    var: Tensor

    def gradients(
        self, grad: Tensor, training: bool, function=batch_norm, dtype=None, wanted="xwb"
    ) -> list[Tensor]:
        """Of x, weight and bias, as far as they are there and in `wanted`."""
        leaves = {}
        for name, t in zip("xwb", (self.x, self.weight, self.bias), strict=True):
            leaf = None if t is None else t.detach().to(dtype or t.dtype)
            leaves[name] = leaf if leaf is None else leaf.requires_grad_(name in wanted)
        mean, var = (v.clone().to(dtype or v.dtype) for v in (self.mean, self.var))
        y = function(leaves["x"], mean, var, leaves["w"], leaves["b"], training)
        asked = [leaf for name, leaf in leaves.items() if leaf is not None and name in wanted]
        return list(torch.autograd.grad(y, asked, grad.to(y.dtype)))


def make_layer(case: Case, device: str, vectors: torch.dtype = F32) -> tuple[Layer, Tensor]:
    x, grad = case.input(device), case.gradient(device)
    channels = case.sizes[1]

    def vector(low: float, high: float) -> Tensor:
        return torch.empty(channels, dtype=torch.float64).uniform_(low, high).to(device, vectors)

    weight, bias = (vector(-2, 2), vector(-1, 1)) if case.affine else (None, None)
    return Layer(x, weight, bias, vector(-1, 1) + case.mean, vector(0.5, 2)), grad


@TRAINING
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_worse_than_torch(case, training, device):
    layer, grad = make_layer(case, device)
    size, channels = layer.x.numel(), case.sizes[1]
    oracle.poison(device, size, size // 2, channels, 7 * channels)
    ours = layer.gradients(grad, training)
    exact = layer.gradients(grad, training, F.batch_norm, torch.float64)
    aligned = Layer(layer.x.clone(), layer.weight, layer.bias, layer.mean, layer.var)
    peers = aligned.gradients(grad.clone(), training, F.batch_norm)
    normalised = oracle.batch_norm(layer.x, running=None if training else (layer.mean, layer.var)).y
    scales = 0.0, oracle.spread(grad * normalised), oracle.spread(grad)
    for actual, truth, peer, scale in zip(ours, exact, peers, scales[: len(ours)], strict=True):
        oracle.assert_no_worse(actual, truth, peer, scale=scale)
    assert ours[0].stride() == layer.x.stride()


# Where terms cancel, errors are compared with the terms and not with what is left of them.
CANCELLING = [
    Case((2, 5, 1, 1), "two values a channel"),
    Case((2, 5, 1, 1), "two values a channel in bf16", BF16),
    Case((4, 8, 32, 32), "gradients far from zero", grad_mean=100.0),
    Case(
        (4, 8, 32, 32),
        "gradients far from zero channels last",
        channels_last=True,
        grad_mean=-100.0,
    ),
]


@TRAINING
@pytest.mark.parametrize("case", CANCELLING, ids=str)
def test_within_error_bounds(case, training, device):
    layer, grad = make_layer(case, device)
    ours = layer.gradients(grad, training)
    dx, dweight, dbias = layer.gradients(grad, training, F.batch_norm, torch.float64)
    exact = oracle.batch_norm(layer.x, running=None if training else (layer.mean, layer.var))
    dims = [dim for dim in range(grad.dim()) if dim != 1]
    terms, unit = grad.double().abs(), 2.0**-24
    products = terms * exact.y.abs()
    assert ((ours[1].double() - dweight).abs() <= 4 * unit * products.sum(dims)).all()
    assert ((ours[2].double() - dbias).abs() <= 4 * unit * terms.sum(dims)).all()
    largest = (
        terms
        + oracle.per_channel(terms.mean(dims), grad)
        + exact.y.abs() * oracle.per_channel(products.mean(dims), grad)
    )
    bound = (
        4
        * unit
        * largest
        * oracle.per_channel(layer.weight.abs() * (exact.var + 1e-5).rsqrt(), grad)
    )
    assert (
        (ours[0].double() - dx).abs() <= bound + 0.5 * torch.finfo(case.dtype).eps * dx.abs()
    ).all()


@TRAINING
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_parameters_in_half_precision(dtype, training, device):
    """As after `.half()`: sums are of float32 all the same, and rounded once."""
    layer, grad = make_layer(Case((4, 8, 30, 30), "", dtype), device, dtype)
    exact = layer.gradients(grad, training, F.batch_norm, torch.float64)
    for actual, truth in zip(layer.gradients(grad, training), exact, strict=True):
        assert actual.dtype == dtype
        assert oracle.error(actual, truth) < torch.finfo(dtype).eps


@TRAINING
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(8, 4, 64, 64), (64, 8, 7, 7)], ids=str)
def test_sums_of_large_half_gradients_do_not_overflow(shape, channels_last, training, device):
    layer, grad = make_layer(Case(shape, "", F16, channels_last), device)
    grad = torch.empty_like(layer.x).copy_(6e4 * grad.sign() + 3e3)
    grad[:, 1] = 6e4
    exact = layer.gradients(grad, training, F.batch_norm, torch.float64)
    ours = layer.gradients(grad, training)
    assert exact[2].abs().max() > 1e8
    assert oracle.error(ours[2], exact[2]) < 1e-6
    # The products with x - mean cancel where gradients are the same, and two roundings of x - mean
    # don't: the mean's is the same in all, and those of the differences depend on few bits of x.
    normalised = oracle.batch_norm(layer.x, running=None if training else (layer.mean, layer.var)).y
    terms = (grad.double() * normalised).abs().sum([dim for dim in range(grad.dim()) if dim != 1])
    assert ((ours[1].double() - exact[1]).abs() <= 2 * 2.0**-24 * terms).all()
    allowed = torch.finfo(F16).eps * exact[0].abs() + 1e-6 * 6e4
    fits = exact[0].abs() < 6e4
    assert ((ours[0].double() - exact[0]).abs() <= allowed)[fits].all()


@TRAINING
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_stay_in_their_channel(bad, channels_last, training, device):
    layer, grad = make_layer(Case((3, 6, 20, 20), "", channels_last=channels_last), device)
    clean = layer.gradients(grad, training)
    grad[1, 2, 3, 4] = bad
    others = [0, 1, 3, 4, 5]
    for actual, expected in zip(layer.gradients(grad, training), clean, strict=True):
        dim = 1 if actual.dim() > 1 else 0
        index = torch.tensor(others, device=device)
        assert torch.equal(actual.index_select(dim, index), expected.index_select(dim, index))
        assert not actual.select(dim, 2).isfinite().all()


def test_gradient_of_a_sum_is_zero(device):
    """A constant gradient has no part that the normalisation lets through."""
    layer, _ = make_layer(Case((16, 5, 33, 40), ""), device)
    for value in (1.0, 0.1, 1e4 / 3):
        dx, dweight, dbias = layer.gradients(torch.full_like(layer.x, value), True)
        assert dx.abs().max() < 1e-5 * value
        assert dweight.abs().max() < 1e-5 * value * layer.x[:, 0].numel()
        torch.testing.assert_close(dbias, torch.full_like(dbias, value * layer.x[:, 0].numel()))


GRADS = {
    "expanded from one": lambda t: torch.full((), 0.7, dtype=t.dtype, device=t.device).expand_as(t),
    "expanded over space": lambda t: torch.randn_like(t)[:, :, :1, :1].expand_as(t),
    "expanded over samples": lambda t: torch.randn_like(t)[:1].expand_as(t),
    "of the other memory format": lambda t: torch.randn_like(t).contiguous(
        memory_format=torch.contiguous_format if not t.is_contiguous() else torch.channels_last
    ),
    "strided": lambda t: torch.randn(*t.shape[:-1], 2 * t.size(-1), device=t.device).to(t.dtype)[
        ..., ::2
    ],
    "transposed": lambda t: torch.randn_like(t.mT).mT,
    "cropped": lambda t: F.pad(torch.randn_like(t), (1, 1, 1, 1))[..., 1:-1, 1:-1],
    "misaligned": lambda t: (
        torch.randn(t.numel() + 1, device=t.device).to(t.dtype)[1:].view(t.shape)
    ),
}


@TRAINING
@pytest.mark.parametrize("layout", GRADS)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(3, 8, 20, 24), (3, 8, 6, 6)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_layout_of_the_gradient(shape, dtype, channels_last, layout, training, device):
    layer, _ = make_layer(Case(shape, "", dtype, channels_last), device)
    grad = GRADS[layout](layer.x)
    expected = layer.gradients(torch.empty_like(layer.x).copy_(grad), training)
    ours = layer.gradients(grad, training)
    tolerance = {"rtol": 1e-5 if dtype == F32 else torch.finfo(dtype).eps, "atol": 1e-5}
    for actual, wanted in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **tolerance)
    if device == "cuda":  # PyTorch's own operations, on the CPU, follow the gradient
        assert ours[0].stride() == layer.x.stride()
    (alone,) = layer.gradients(grad, training, wanted="x")
    torch.testing.assert_close(alone, expected[0], **tolerance)


@TRAINING
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(8, 16, 64, 64), (16, 64, 7, 7), (2, 1, 500, 500)], ids=str)
def test_repeats_bit_for_bit(shape, channels_last, training, device):
    layer, grad = make_layer(Case(shape, "", channels_last=channels_last), device)
    first = layer.gradients(grad, training)
    for _ in range(3):
        oracle.poison(device, layer.x.numel())
        assert all(
            torch.equal(a, b) for a, b in zip(first, layer.gradients(grad, training), strict=True)
        )


@TRAINING
@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw", "xb", "wb"])
@pytest.mark.parametrize("shape", [(3, 8, 20, 24), (3, 8, 6, 6)], ids=str)
def test_what_is_asked_for(shape, wanted, training, device):
    layer, grad = make_layer(Case(shape, ""), device)
    everything = dict(zip("xwb", layer.gradients(grad, training), strict=True))
    for name, actual in zip(wanted, layer.gradients(grad, training, wanted=wanted), strict=True):
        torch.testing.assert_close(actual, everything[name], rtol=1e-5, atol=1e-5)


KERNELS = {
    # What is asked for: kernels in training with channels on chip, without, and in eval.
    "xwb": (1, 3, 3),
    "x": (1, 3, 1),
    "w": (2, 2, 2),
    "b": (2, 2, 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "training"),
    [((4, 8, 32, 32), True), ((4, 8, 8, 8), True), ((4, 8, 32, 32), False)],
    ids=str,
)
@pytest.mark.parametrize("wanted", KERNELS)
def test_nothing_else_is_launched(wanted, shape, training):
    layer, grad = make_layer(Case(shape, ""), "cuda")
    leaves = dict(zip("xwb", (layer.x, layer.weight, layer.bias), strict=True))
    for name in wanted:
        leaves[name].requires_grad_()
    y = batch_norm(layer.x, layer.mean, layer.var, layer.weight, layer.bias, training)
    asked = [leaves[name] for name in wanted]
    torch.autograd.grad(y, asked, grad, retain_graph=True)  # what happens once
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.autograd.grad(y, asked, grad)
        torch.cuda.synchronize()
    events = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    names = [event.name for event in events if not event.name.startswith("Activity")]
    if not names:
        pytest.skip("the profiler sees no kernels here")
    assert all("cutlass_bn" in name for name in names), names
    on_chip = ops.batch_norm_plan(layer.x.detach(), True)[0] > 0
    assert len(names) == KERNELS[wanted][0 if training and on_chip else 1 if training else 2], names
    assert on_chip == (shape == (4, 8, 32, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_memory_of_the_backward(channels_last):
    """dx and little else: no copy of a gradient of x's layout, no float32 copies of halves."""
    layer, grad = make_layer(Case((16, 64, 64, 64), "", BF16, channels_last), "cuda")
    layer.x.requires_grad_()
    y = batch_norm(layer.x, None, None, layer.weight, layer.bias, training=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (dx,) = torch.autograd.grad(y, layer.x, grad)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.25 * dx.numel() * dx.element_size()


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_training_step_in_a_graph(channels_last):
    """Forward, backward and an update of the parameters, captured once and replayed on new data."""
    modules = [BatchNorm2d(16, device="cuda") for _ in range(2)]
    x = torch.randn(4, 16, 20, 20, device="cuda")
    x = (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_()

    def step(module: BatchNorm2d) -> Tensor:
        gradients = torch.autograd.grad(module(x).pow(3).mean(), [x, *module.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients[1:], strict=True):
                parameter.sub_(gradient, alpha=0.1)
        return gradients[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(modules[0])
    torch.cuda.current_stream().wait_stream(side)
    modules[0].reset_parameters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = step(modules[0])
    for _ in range(3):
        with torch.no_grad():
            x.normal_(1.0, 2.0)
        graph.replay()
        assert torch.equal(dx, step(modules[1]))
        for captured, eager in zip(
            modules[0].state_dict().values(), modules[1].state_dict().values(), strict=True
        ):
            assert torch.equal(captured, eager)


@TRAINING
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_gradcheck_in_float64(affine, training, device):
    layer, _ = make_layer(
        Case((3, 2, 3, 2), "", torch.float64, affine=affine), device, torch.float64
    )

    def function(*tensors: Tensor) -> Tensor:
        return batch_norm(
            tensors[0], layer.mean.clone(), layer.var.clone(), *tensors[1:], training=training
        )

    tensors = [t.requires_grad_() for t in (layer.x, layer.weight, layer.bias) if t is not None]
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)
