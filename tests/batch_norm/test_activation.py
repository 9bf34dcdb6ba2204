"""functional.batch_norm with an activation and a residual, against float64 and torch's chain."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from oracle import error, poison, spread
from torch import Tensor

from cutlass_bn._activations import ACTIVATIONS
from cutlass_bn.functional import batch_norm

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
CHANNELS_LAST = torch.channels_last


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype = F32
    channels_last: bool = False

    def __str__(self) -> str:
        layout = "-channels_last" if self.channels_last else ""
        return f"{'x'.join(map(str, self.shape))}-{str(self.dtype)[6:]}{layout}"

    def random(self, device: str) -> Tensor:
        t = torch.randn(self.shape, device=device, dtype=self.dtype)
        return t.contiguous(memory_format=CHANNELS_LAST) if self.channels_last else t


CASES = [
    Case((8, 16, 32, 32)),  # on chip
    Case((8, 16, 32, 32), BF16),
    Case((3, 5, 33, 7)),  # no whole vectors
    Case((4, 24, 8, 8), F16),  # small planes
    Case((300, 33)),  # a matrix of odd width
    Case((257, 64), BF16),
    Case((8, 64, 14, 14), BF16, True),
    Case((8, 64, 14, 14), F32, True),
    Case((5, 3, 9, 11), F16, True),
    Case((2, 8, 3, 4, 5)),
]


class Layer(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor
    grad: Tensor

    @classmethod
    def random(cls, case: Case, with_residual: bool, device: str) -> Layer:
        c = case.shape[1]
        weight, bias, mean = (torch.randn(c, device=device) for _ in range(3))
        var = torch.rand(c, device=device) + 0.5
        x, residual, grad = (case.random(device) for _ in range(3))
        return cls(x, residual if with_residual else None, weight, bias, mean, var, grad)

    def double(self) -> Layer:
        return Layer(*(None if t is None else t.double() for t in self))


def chain(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, training: bool,
    *, activation: str | None, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    y = F.batch_norm(x, mean, var, weight, bias, training)
    return ACTIVATIONS[activation].forward(y if residual is None else y + residual)


Function = Callable[..., Tensor]


def results(
    function: Function, layer: Layer, training: bool, activation: str | None, asked: str
) -> dict[str, Tensor]:
    leaves = {name: getattr(layer, name) for name in ("x", "residual", "weight", "bias")}
    leaves = {
        name: t.detach().clone().requires_grad_(name in asked.split())
        for name, t in leaves.items()
        if t is not None
    }
    mean, var = layer.mean.clone(), layer.var.clone()
    y = function(
        leaves["x"], mean, var, leaves["weight"], leaves["bias"], training,
        activation=activation, residual=leaves.get("residual"),
    )  # fmt: skip
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(y, list(wanted.values()), layer.grad)
    gradients = {f"d{name}": g for name, g in zip(wanted, found, strict=True)}
    return {"y": y, **gradients, "running_mean": mean, "running_var": var}


def assert_exact(
    layer: Layer, training: bool, activation: str | None, asked: str, factor: float = 2.0
) -> None:
    poison(layer.x.device.type, layer.x.numel(), layer.x.numel() // 2)
    ours = results(batch_norm, layer, training, activation, asked)
    theirs = results(chain, layer, training, activation, asked)
    exact = results(chain, layer.double(), training, activation, asked)
    for name, value in ours.items():
        peer = theirs[name]
        assert (value.dtype, value.shape) == (peer.dtype, peer.shape), name
        if name in ("dx", "dresidual"):
            assert value.stride() == layer.x.stride(), name
        eps = 4 * torch.finfo(value.dtype).eps  # a few roundings are forgiven to both
        if name in ("dweight", "dbias"):  # what is summed is rounded to x's dtype, as in torch
            eps = max(eps, torch.finfo(layer.x.dtype).eps / 2)
        scale = spread(layer.grad) if name in ("dweight", "dbias") else 0.0
        ours_off, theirs_off = (error(t, exact[name], scale) for t in (value, peer))
        assert ours_off <= max(factor * theirs_off, eps), f"{name}: {ours_off}, torch {theirs_off}"


@TRAINING
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_as_exact_as_torchs_chain(case, activation, with_residual, training, device):
    layer = Layer.random(case, with_residual, device)
    asked = "x residual weight bias" if with_residual else "x weight bias"
    assert_exact(layer, training, activation, asked)


@TRAINING
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("asked", ["x", "residual", "weight", "bias", "residual bias", "x weight"])
def test_only_some_gradients(asked, activation, training, device):
    for case in (CASES[1], CASES[2], CASES[6]):
        assert_exact(Layer.random(case, True, device), training, activation, asked)


@TRAINING
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu"])
def test_operands_of_any_layout(activation, training, device):
    """residual and grad are of the other memory format, expanded, sliced or misaligned."""
    shape = (6, 16, 10, 10)
    layer = Layer.random(Case(shape), True, device)
    wide = torch.randn(6, 16, 10, 11, device=device)
    flat = torch.randn(layer.x.numel() + 1, device=device)
    others = [
        layer.x.contiguous(memory_format=CHANNELS_LAST).neg(),
        torch.randn(1, 16, 1, 1, device=device).expand(shape),
        wide[..., :10],
        flat[1:].view(shape),
        torch.randn(16, 6, 10, 10, device=device).transpose(0, 1),
    ]
    for residual, grad in itertools.permutations(others, 2):
        other = layer._replace(residual=residual, grad=grad)
        ours = results(batch_norm, other, training, activation, "x residual weight bias")
        exact = results(chain, other.double(), training, activation, "x residual weight bias")
        assert ours["y"].is_contiguous()
        assert ours["dx"].is_contiguous()
        for name, value in ours.items():
            assert error(value, exact[name]) < 1e-5, name


@TRAINING
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_large_mean(channels_last, training, device):
    """x - mean comes first, in the forward and where the backward works the mask out again."""
    layer = Layer.random(Case((16, 8, 16, 16), F32, channels_last), True, device)
    layer = layer._replace(x=layer.x + 1e4, mean=layer.mean + 1e4)
    for activation in ("relu", "gelu"):
        for residual in (layer.residual, None):
            other = layer._replace(residual=residual)
            ours = results(batch_norm, other, training, activation, "x bias")
            exact = results(chain, other.double(), training, activation, "x bias")
            assert error(ours["y"], exact["y"]) < 2e-3  # 2^-23 * |mean| / std
            again = results(batch_norm, other._replace(grad=ours["y"]), training, None, "bias")
            assert again["dbias"].isfinite().all()


def test_what_is_not_finite_stays_where_it_is(device):
    layer = Layer.random(Case((4, 8, 12, 12)), True, device)
    x, residual = layer.x.clone(), layer.residual.clone()
    x[1, 2, 3, 4], residual[2, 5, 6, 7] = float("nan"), float("inf")
    layer = layer._replace(x=x, residual=residual)
    for activation in ACTIVATIONS:
        y = results(batch_norm, layer, True, activation, "x residual")["y"]
        theirs = results(chain, layer, True, activation, "x residual")["y"]
        assert torch.equal(y.isnan(), theirs.isnan())
        assert torch.equal(y.isinf(), theirs.isinf())


@TRAINING
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_gradients(activation, training, device):
    layer = Layer.random(Case((3, 4, 5, 6)), True, device).double()
    for dtype in (torch.float64, F32):
        inputs = [
            t.to(dtype).requires_grad_()
            for t in (layer.x, layer.weight, layer.bias, layer.residual)
        ]

        def second(function: Function, inputs: list[Tensor] = inputs) -> tuple[Tensor, ...]:
            x, weight, bias, residual = inputs
            mean, var = (t.to(x.dtype) for t in (layer.mean, layer.var))
            y = function(
                x, mean, var, weight, bias, training, activation=activation, residual=residual
            )
            grad = layer.grad.to(x.dtype).requires_grad_()
            first = torch.autograd.grad(y, inputs, grad, create_graph=True)
            return torch.autograd.grad(
                sum((g * g.detach().cos()).sum() for g in first),
                [*inputs, grad],
                materialize_grads=True,
            )

        for ours, theirs in zip(second(batch_norm), second(chain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_autocast_casts_the_residual(activation, device):
    x, residual = (torch.randn(4, 8, 6, 6, device=device) for _ in range(2))
    weight, bias, mean = (torch.randn(8, device=device) for _ in range(3))
    var, residual = torch.rand(8, device=device) + 0.5, residual.requires_grad_()
    with torch.autocast(device, BF16):
        y = batch_norm(
            x.bfloat16(), mean, var, weight, bias, activation=activation, residual=residual
        )
        assert y.dtype == BF16
    y.sum().backward()
    assert residual.grad.dtype == F32


@TRAINING
def test_an_empty_batch(training, device):
    x = torch.randn(0, 3, 4, 4, device=device).requires_grad_()
    residual = torch.randn(0, 3, 4, 4, device=device).requires_grad_()
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    weight = torch.ones(3, device=device).requires_grad_()
    y = batch_norm(x, mean, var, weight, None, training, activation="relu", residual=residual)
    assert y.shape == x.shape
    dx, dresidual, dweight = torch.autograd.grad(y.sum(), (x, residual, weight))
    assert dx.shape == dresidual.shape == x.shape
    assert dweight.tolist() == [0, 0, 0]


@TRAINING
def test_wrong_arguments_change_nothing(training, device):
    x = torch.randn(4, 3, 5, 5, device=device)
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    for options, kind, text in [
        ({"activation": "tanh"}, ValueError, "activation: expected None, 'relu', .* got 'tanh'"),
        ({"residual": x[:2]}, RuntimeError, r"residual: expected shape \[4, 3, 5, 5\] like input"),
        ({"residual": x[0]}, RuntimeError, "residual: expected shape"),
        ({"residual": x.half()}, RuntimeError, "residual: expected torch.float32 like input"),
        ({"residual": x.to("meta")}, RuntimeError, "residual: expected a tensor on"),
    ]:
        with pytest.raises(kind, match=text):
            batch_norm(x, mean, var, training=training, **options)
        assert mean.tolist() == [0, 0, 0]
        assert var.tolist() == [1, 1, 1]


@TRAINING
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_compiles_whole(with_residual, training, device):
    layer = Layer.random(Case((4, 8, 6, 6)), with_residual, device)
    compiled = torch.compile(batch_norm, fullgraph=True, backend="aot_eager")
    asked = "x residual weight bias" if with_residual else "x weight bias"
    ours = results(compiled, layer, training, "relu", asked)
    exact = results(chain, layer.double(), training, "relu", asked)
    for name, value in ours.items():
        assert error(value, exact[name]) < 1e-5, name
