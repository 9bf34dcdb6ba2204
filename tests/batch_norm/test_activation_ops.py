"""The batch-norm ops with an activation and a residual behind the normalisation, on a GPU, against
float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import oracle
import pytest
import torch
import torch.nn.functional as F
from batch_norm_cases import Case
from torch import Tensor

from cutlass_bn import library_is_loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library_is_loaded(), reason="needs the compiled library"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5
# In the order of the codes of csrc/common/activation.h.
ACTIVATIONS = {
    "none": lambda v: v,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
}
CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
RECTIFIERS = ("relu", "leaky_relu")
GRADIENTS = ("dx", "dresidual", "dweight", "dbias")
ops = torch.ops.cutlass_bn


@dataclass(frozen=True)
class Layout:
    sizes: tuple[int, ...]
    why: str
    channels_last: bool = False
    offset: int = 0

    def __str__(self) -> str:
        return self.why.replace(" ", "-")

    def dense(self, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
        case = Case(self.sizes, self.why, dtype, self.channels_last, offset=self.offset)
        return case.dense("cuda", mean, std)


LAYOUTS = [
    Layout((24, 6, 48, 52), "on chip, blocks that share a channel"),
    Layout((3, 300, 20, 20), "on chip, many channels"),
    Layout((3, 5, 17, 19), "planes that are no whole vectors"),
    Layout((5, 8, 24, 28), "planes at odd addresses", offset=1),
    Layout((6, 16, 7, 7), "small planes"),
    Layout((7, 5, 3, 3), "small planes that are no whole vectors"),
    Layout((8, 64, 14, 14), "channels_last", channels_last=True),
    Layout((9, 200, 5, 5), "channels_last, more channels than a block", channels_last=True),
    Layout((4, 3, 19, 21), "channels_last of 3", channels_last=True),
    Layout((4, 32, 6, 6), "channels_last at odd addresses", channels_last=True, offset=3),
    Layout((300, 72), "matrix"),
    Layout((129, 37), "matrix of odd rows"),
    Layout((5, 24, 40), "sequences, channels adjacent", channels_last=True),
]
TWO_PASSES = Layout((64, 2, 256, 256), "planes in two passes")


def poison(*tensors: Tensor) -> None:
    """Leaves NaN where outputs of these tensors' sizes are likely to be allocated."""
    oracle.poison("cuda", *(t.numel() * t.element_size() // 4 + 1 for t in tensors))


@dataclass
class Arguments:
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor  # running
    var: Tensor
    dy: Tensor
    activation: str
    training: bool

    @property
    def code(self) -> int:
        return CODES[self.activation]

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """y, and in training stats."""
        poison(self.x)
        affine = (self.weight, self.bias)
        if not self.training:
            running = (self.mean, self.var)
            return ops.batch_norm_inference(
                self.x, self.residual, *running, *affine, EPS, self.code
            ), None
        running = (self.mean.clone(), self.var.clone(), None)
        return ops.batch_norm_training(
            self.x, self.residual, *running, *affine, 0.1, EPS, self.code
        )

    def after(self, y: Tensor) -> Tensor | None:
        if self.residual is None or self.activation == "none":
            return None
        return y if self.activation in RECTIFIERS else self.residual

    def backward(self, y: Tensor, stats: Tensor | None, *wanted: str) -> dict[str, Tensor]:
        """The gradients that are wanted, given no more than they need."""
        saved = self.after(y)
        makes_v = self.activation != "none" and (saved is None or saved is not y)
        needs_x = "dweight" in wanted or makes_v or (self.training and "dx" in wanted)
        poison(self.x, self.x)
        before = (self.dy, self.x if needs_x else None)
        behind = (
            self.code, "dx" in wanted, "dresidual" in wanted,
            F32 if "dweight" in wanted else None, F32 if "dbias" in wanted else None,
        )  # fmt: skip
        bias = self.bias if makes_v else None
        if self.training:
            stats = stats if needs_x else None
            results = ops.batch_norm_backward(*before, stats, self.weight, bias, saved, *behind)
        else:
            mean = self.mean if needs_x else None
            var = self.var if needs_x or "dx" in wanted else None
            results = ops.batch_norm_inference_backward(
                *before, mean, var, self.weight, bias, saved, EPS, *behind
            )
        for name, result in zip(GRADIENTS, results, strict=True):
            assert name in wanted or result.numel() == 0
        return {n: r for n, r in zip(GRADIENTS, results, strict=True) if n in wanted}

    def gradients_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Of these, what the op can be asked for."""
        without = self.residual is None or self.activation == "none"
        return tuple(name for name in names if not (without and name == "dresidual"))

    def chain(self, dtype: torch.dtype, y: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """y and the gradients by torch. Given y, relu and leaky_relu pass on where y has passed:
        near 0 float64 may decide otherwise."""
        wide = dtype == torch.float64

        def cast(t: Tensor | None) -> Tensor | None:
            if t is None:
                return None
            return (t.double() if wide else t).detach().clone().requires_grad_()

        x, residual, weight, bias = map(cast, (self.x, self.residual, self.weight, self.bias))
        mean, var = (t.double() if wide else t.clone() for t in (self.mean, self.var))
        v = F.batch_norm(x, mean, var, weight, bias, self.training, 0.1, EPS)
        if residual is not None:
            v = v + residual
        if y is not None and self.activation in RECTIFIERS:
            slope = 0.0 if self.activation == "relu" else 0.01
            exact = v * torch.where(y > 0, 1.0, slope)
        else:
            exact = ACTIVATIONS[self.activation](v)
        leaves = {"dx": x, "dresidual": residual, "dweight": weight, "dbias": bias}
        leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
        dy = self.dy.to(exact.dtype, copy=True)  # where cuDNN can take it: at an even address
        grads = torch.autograd.grad(exact, list(leaves.values()), dy)
        return exact.detach(), dict(zip(leaves, grads, strict=True))


def make(
    layout: Layout,
    dtype: torch.dtype,
    activation: str,
    with_residual: bool,
    training: bool,
    mean: float = 0.5,
    std: float = 1.5,
) -> Arguments:
    channels = layout.sizes[1]
    return Arguments(
        layout.dense(dtype, mean, std),
        layout.dense(dtype) if with_residual else None,
        torch.rand(channels, device="cuda") * 2 - 1,  # of both signs
        torch.randn(channels, device="cuda") * 0.3,
        torch.randn(channels, device="cuda") * 0.3 + mean,
        torch.rand(channels, device="cuda") * std**2 + 0.5,
        layout.dense(dtype, 0.2),
        activation,
        training,
    )


def assert_right(a: Arguments, factor: float = 2.0) -> None:
    y, stats = a.forward()
    assert y.dtype == a.x.dtype
    assert y.stride() == a.x.stride()
    torch_y, torch_gradients = a.chain(a.x.dtype, None)
    exact_y, _ = a.chain(torch.float64, None)
    oracle.assert_no_worse(y, exact_y, torch_y, factor)
    wanted = a.gradients_of(GRADIENTS)
    actual = a.backward(y, stats, *wanted)
    _, exact = a.chain(torch.float64, y)
    _, exact_for_torch = a.chain(torch.float64, torch_y)
    for name in wanted:
        scale = 0.0
        if name in ("dweight", "dbias"):
            scale = oracle.spread(a.dy)
        theirs = oracle.error(torch_gradients[name], exact_for_torch[name], scale)
        ours = oracle.error(actual[name], exact[name], scale)
        allowed = factor * max(theirs, 1.5 * torch.finfo(actual[name].dtype).eps)
        assert ours <= allowed, f"{name}: error {ours:.3e}, PyTorch's {theirs:.3e}"
        if name in ("dx", "dresidual"):
            assert actual[name].stride() == a.x.stride()


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_against_float64(layout, dtype, activation, with_residual, training):
    assert_right(make(layout, dtype, activation, with_residual, training))


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_large_channels(dtype, activation, with_residual):
    layout = TWO_PASSES if dtype == F32 else Layout((128, 2, 256, 256), "in two passes, half")
    assert_right(make(layout, dtype, activation, with_residual, True))


SUBSETS = [subset for n in range(5) for subset in itertools.combinations(GRADIENTS, n)]
SUBSET_LAYOUTS = [LAYOUTS[i] for i in (0, 2, 4, 6, 8)]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", SUBSET_LAYOUTS, ids=str)
def test_only_what_is_asked_for(layout, activation, with_residual, training):
    """Any subset has the values that all have, and reads nothing that it is not given."""
    a = make(layout, BF16, activation, with_residual, training)
    y, stats = a.forward()
    every = a.backward(y, stats, *a.gradients_of(GRADIENTS))
    for subset in SUBSETS:
        wanted = a.gradients_of(subset)
        for name, gradient in a.backward(y, stats, *wanted).items():
            # Two passes round dv where it is stored; sums on chip run in another order.
            near = torch.finfo(gradient.dtype).eps * 8 * every[name].abs().max().item()
            if name in ("dweight", "dbias"):
                near = 1e-2 * oracle.spread(a.dy)
            torch.testing.assert_close(gradient, every[name], rtol=0.0, atol=near)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("layout", SUBSET_LAYOUTS, ids=str)
def test_mean_far_from_zero(layout, with_residual, activation):
    a = make(layout, F32, activation, with_residual, True, mean=1e4)
    a.weight = torch.ones_like(a.weight)
    y, stats = a.forward()
    exact, _ = a.chain(torch.float64, None)
    assert (y - exact).abs().max() < 2**-23 * 1e4 / 1.5 * 1.2 + 1e-4
    gradients = a.backward(y, stats, *a.gradients_of(GRADIENTS))
    _, exact_gradients = a.chain(torch.float64, y)
    _, torch_gradients = a.chain(F32, None)
    for name, gradient in gradients.items():
        scale = oracle.spread(a.dy) if name in ("dweight", "dbias") else 0.0
        oracle.assert_no_worse(
            gradient, exact_gradients[name], torch_gradients[name], 3.0, max(scale, 1.0)
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", SUBSET_LAYOUTS, ids=str)
def test_constant_channels(layout, dtype, activation):
    """y is activation(bias + residual) exactly."""
    a = make(layout, dtype, activation, True, True)
    a.x = (
        torch.empty_like(a.x).copy_(
            torch.randn(layout.sizes[1], device="cuda")
            .mul_(100)
            .view([1, -1] + [1] * (len(layout.sizes) - 2))
            .expand(layout.sizes)
        )
        if layout.offset == 0
        else a.x
    )
    y, stats = a.forward()
    v = oracle.per_channel(a.bias, a.x) + a.residual.float()
    expected = ACTIVATIONS[activation](v.double())
    bound = torch.finfo(dtype).eps * expected.abs() + 1e-6
    assert ((y - expected).abs() <= bound).all()
    for gradient in a.backward(y, stats, *a.gradients_of(GRADIENTS)).values():
        assert gradient.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", SUBSET_LAYOUTS, ids=str)
def test_non_finite_values_stay_where_they_are(layout, activation, training, bad):
    """In x: in their channel, in eval in their element. In dy and the residual the same."""
    for where in ("x", "dy", "residual"):
        a = make(layout, F32, activation, True, training)
        y, stats = a.forward()
        names = a.gradients_of(GRADIENTS)
        clean = {"y": y, **a.backward(y, stats, *names)}
        tensor = getattr(a, where)
        tensor[1, 2].view(-1)[0:1].fill_(bad) if tensor.dim() == 2 else tensor[1, 2, 1, 1].fill_(
            bad
        )
        y, stats = a.forward()
        dirty = {"y": y, **a.backward(y, stats, *names)}
        others = [c for c in range(a.x.size(1)) if c != 2]
        for name, result in dirty.items():
            if name in ("dweight", "dbias"):
                assert torch.equal(result[others], clean[name][others]), (where, name)
            else:
                assert torch.equal(result[:, others], clean[name][:, others]), (where, name)
        if not training:
            for name in ("y", "dx"):
                differs = (dirty[name] != clean[name]) | (dirty[name].isnan())
                assert differs.sum() <= 1, (where, name)


def test_rectifiers_pass_on_what_torch_does():
    """NaN, infinities and zeros of v and of dy, in eval with an identity for BatchNorm."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0])
    x, dy = (t.reshape(-1, 1).cuda() for t in torch.meshgrid(values, values, indexing="ij"))
    zero, one = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    for activation in RECTIFIERS:
        code = CODES[activation]
        leaf = x.clone().requires_grad_()
        expected = ACTIVATIONS[activation](leaf)
        (expected_dx,) = torch.autograd.grad(expected, leaf, dy)
        for residual in (None, torch.zeros_like(x)):
            y = ops.batch_norm_inference(x, residual, zero, one, None, None, 0.0, code)
            torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
            after = None if residual is None else y
            dx, dresidual, *_ = ops.batch_norm_inference_backward(
                dy, x, zero, one, None, None, after, 0.0, code, True, after is not None, None, None
            )
            torch.testing.assert_close(dx, expected_dx, rtol=0, atol=0, equal_nan=True)
            if after is not None:
                torch.testing.assert_close(dresidual, dx, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_any_strides(training, activation):
    """Whatever does not lie as the input is copied; an input with gaps too, and vectors."""
    layout = Layout((6, 16, 8, 10), "channels_last", channels_last=True)
    a = make(layout, F32, activation, True, training)
    y, stats = a.forward()
    names = a.gradients_of(GRADIENTS)
    expected = {"y": y, **a.backward(y, stats, *names)}

    def gaps(t: Tensor) -> Tensor:
        return torch.stack([t, torch.full_like(t, float("nan"))], -1)[..., 0]

    original = a.x
    for other in (original.contiguous(), gaps(original), gaps(original.contiguous())):
        a.x = other
        a.residual, a.dy = a.residual.contiguous(), gaps(a.dy)
        a.weight, a.bias = gaps(a.weight), gaps(a.bias)
        y, stats = a.forward()
        peer = F.batch_norm(other, a.mean, a.var, None, None, True, 0.0, EPS)
        assert y.stride() == peer.stride()
        for name, result in {"y": y, **a.backward(y, stats, *names)}.items():
            torch.testing.assert_close(result, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", SUBSET_LAYOUTS, ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_same_bits_every_time(layout, activation):
    a = make(layout, BF16, activation, True, True)
    results = []
    for _ in range(3):
        y, stats = a.forward()
        results.append([y, *a.backward(y, stats, *GRADIENTS).values()])
    for other in results[1:]:
        assert all(torch.equal(first, then) for first, then in zip(results[0], other, strict=True))


def test_mistakes():
    a = make(LAYOUTS[4], F32, "relu", True, True)
    running = (a.mean, a.var, None)
    before = a.mean.clone()

    def training(x, residual, code=1):
        return ops.batch_norm_training(x, residual, *running, None, None, 0.1, EPS, code)

    with pytest.raises(RuntimeError, match=r"residual: expected shape \[6, 16, 7, 7\] like input"):
        training(a.x, a.residual[:, :, :1])
    with pytest.raises(RuntimeError, match="residual: expected float32 like input, got float16"):
        training(a.x, a.residual.half())
    with pytest.raises(RuntimeError, match="residual: expected a tensor on cuda"):
        training(a.x, a.residual.cpu())
    with pytest.raises(RuntimeError, match="activation: expected 0"):
        training(a.x, a.residual, 5)
    assert torch.equal(a.mean, before)
    y, stats = a.forward()

    def backward(after, code, residual_grad, x=a.x):
        return ops.batch_norm_backward(
            a.dy, x, stats, None, None, after, code, True, residual_grad, None, None
        )

    with pytest.raises(RuntimeError, match="after: expected a tensor, as the gradient of residual"):
        backward(None, 1, True)
    with pytest.raises(RuntimeError, match="residual_grad: expected False without an activation"):
        backward(None, 0, True)
    with pytest.raises(RuntimeError, match="input: expected a tensor, as the gradient of input"):
        backward(y, 1, True, None)
    with pytest.raises(RuntimeError, match=r"after: expected shape \[6, 16, 7, 7\] like grad"):
        backward(y[:1], 1, True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_empty(activation):
    layout = Layout((0, 5, 4, 4), "empty")
    a = make(layout, F32, activation, True, True)
    y, stats = a.forward()
    assert y.shape == a.x.shape
    gradients = a.backward(y, stats, *a.gradients_of(GRADIENTS))
    assert gradients["dx"].shape == a.x.shape
    assert torch.equal(gradients["dbias"], torch.zeros(5, device="cuda"))
