"""What the backend puts into a graph, and that the graph computes the same as before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_no_worse
from torch import Tensor, fx, nn

from cutlass_bn import functional
from cutlass_bn.backend._rewrite import rewrite

CHANNELS = 4


class Model(nn.Module):
    """Two batch norms, a linear layer and what a test computes with them."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.function = function
        self.bn, self.other = (nn.BatchNorm2d(CHANNELS, **options) for _ in range(2))
        self.bn1d = nn.BatchNorm1d(CHANNELS)
        self.linear = nn.Linear(6, CHANNELS)
        self.scale = nn.Parameter(torch.randn(CHANNELS))
        self.convolution = nn.Conv2d(CHANNELS, CHANNELS, 1)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


class Recorder:
    """A backend that notes our calls, as text."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        count = rewrite(graph_module)
        found = [text for node in graph_module.graph.nodes if (text := self.describe(node))]
        assert count == len(found)
        self.calls += found
        return graph_module.forward

    @staticmethod
    def describe(node: fx.Node) -> str:
        if node.target not in (functional.batch_norm, functional.linear_batch_norm):
            return ""
        given = node.kwargs
        parts = ["linear" if node.target is functional.linear_batch_norm else "", "bn"]
        parts[1:1] = ["scale"] if given.get("scale") is not None else []
        parts += ["add"] if given.get("residual") is not None else []
        return " ".join(part for part in (*parts, given.get("activation")) if part)


def images(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(3, CHANNELS, 5, 5).to(dtype) for _ in range(2)]


def rows(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape or (7, 6))]


def run(model: nn.Module, call: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, gradients and state."""
    inputs = [x.clone().requires_grad_(torch.is_grad_enabled()) for x in inputs]
    outputs = call(*(x * 1 for x in inputs))  # which may be changed in place
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    losses = [(y * torch.arange(y.numel()).view_as(y).cos()).sum() for y in outputs]
    if losses := [loss for loss in losses if loss.requires_grad]:
        torch.autograd.backward(losses)
    tensors = [*inputs, *model.parameters()]
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    return [y.detach() for y in (*outputs, *gradients, *model.buffers())]


def check(model: nn.Module, inputs: Sequence[Tensor], expected: Sequence[str]) -> None:
    """That the graph gets these calls, in training and in eval, and is as exact as before."""
    for training in (True, False):
        model.train(training)
        wide, twin = copy.deepcopy(model).double(), copy.deepcopy(model)
        exact = run(wide, wide, [x.double() for x in inputs])
        peer = run(model, model, inputs)
        recorder = Recorder()
        torch.compiler.reset()
        actual = run(twin, torch.compile(twin, backend=recorder, fullgraph=True), inputs)
        assert recorder.calls == list(expected)
        for tensors in zip(actual, exact, peer, strict=True):
            if tensors[0].is_floating_point():
                assert_no_worse(*tensors, scale=1.0)
            else:
                assert torch.equal(tensors[0], tensors[2])


ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "F.relu": ("relu", F.relu),
    "F.relu in place": ("relu", lambda y: F.relu(y, inplace=True)),
    "torch.relu": ("relu", torch.relu),
    "torch.relu_": ("relu", torch.relu_),
    "F.relu_": ("relu", F.relu_),
    "relu": ("relu", lambda y: y.relu()),
    "relu_": ("relu", lambda y: y.relu_()),
    "nn.ReLU": ("relu", nn.ReLU(inplace=True)),
    "F.leaky_relu": ("leaky_relu", F.leaky_relu),
    "F.leaky_relu_": ("leaky_relu", F.leaky_relu_),
    "nn.LeakyReLU": ("leaky_relu", nn.LeakyReLU(inplace=True)),
    "F.silu": ("silu", F.silu),
    "nn.SiLU": ("silu", nn.SiLU(inplace=True)),
    "F.gelu": ("gelu", F.gelu),
    "nn.GELU": ("gelu", nn.GELU()),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    activation, function = ACTIVATIONS[name]
    check(Model(lambda m, x, r: function(m.bn(x))), images(), [f"bn {activation}"])
    check(Model(lambda m, x, r: function(m.bn(x) + r)), images(), [f"bn add {activation}"])


def in_place(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    y += r
    return y.relu_()


def residual_made_between(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    return F.relu(y + m.other(m.convolution(r)))


def two_norms_of_one_input(m: Model, x: Tensor, r: Tensor) -> Tensor:
    a = m.bn(x)
    b = m.other(x)
    return F.relu(a + b)


FUSED: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "residual first": (lambda m, x, r: F.relu(r + m.bn(x)), ["bn add relu"]),
    "torch.add": (lambda m, x, r: F.relu(torch.add(m.bn(x), r)), ["bn add relu"]),
    "method": (lambda m, x, r: F.relu(m.bn(x).add(r)), ["bn add relu"]),
    "method in place": (lambda m, x, r: F.relu(m.bn(x).add_(r)), ["bn add relu"]),
    "in place": (in_place, ["bn add relu"]),
    "input as residual": (lambda m, x, r: F.relu(m.bn(x) + x), ["bn add relu"]),
    "residual made between": (residual_made_between, ["bn", "bn add relu"]),
    "two norms of one input": (two_norms_of_one_input, ["bn", "bn add relu"]),
    "twice": (lambda m, x, r: F.silu(m.bn(F.relu(m.bn(x)))), ["bn relu", "bn silu"]),
    "result used twice": (lambda m, x, r: (y := F.relu(m.bn(x))) + y, ["bn relu"]),
    "no statistics": (
        lambda m, x, r: F.relu(F.batch_norm(x, None, None, training=True)),
        ["bn relu"],
    ),
    "torch.batch_norm": (
        lambda m, x, r: F.relu(
            torch.batch_norm(
                x, m.bn.weight, None, m.bn.running_mean, m.bn.running_var, True, 0.5, 1e-3, False
            )
        ),
        ["bn relu"],
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    function, expected = FUSED[name]
    check(Model(function), images(), expected)


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": 0.0, "eps": 1e-3}],
    ids=str,
)
def test_options(options):
    check(Model(lambda m, x, r: F.relu(m.bn(x)), **options), images(), ["bn relu"])


def scaled_in_place(m: Model, x: Tensor) -> Tensor:
    z = m.linear(x)
    z *= m.scale
    return m.bn1d(z)


LINEAR: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "alone": (lambda m, x: m.bn1d(m.linear(x)), ["linear bn"]),
    "activation": (lambda m, x: F.gelu(m.bn1d(m.linear(x))), ["linear bn gelu"]),
    "without bias": (
        lambda m, x: F.relu(m.bn1d(F.linear(x, m.linear.weight))),
        ["linear bn relu"],
    ),
    "scale": (lambda m, x: m.bn1d(m.linear(x) * m.scale).relu(), ["linear scale bn relu"]),
    "scale first": (lambda m, x: m.bn1d(m.scale * m.linear(x)), ["linear scale bn"]),
    "scaled in place": (scaled_in_place, ["linear scale bn"]),
    "used elsewhere": (
        lambda m, x: (F.relu(m.bn1d(z := m.linear(x))), z),
        ["bn relu"],
    ),
    "norm used elsewhere": (lambda m, x: (F.relu(y := m.bn1d(m.linear(x))), y), ["linear bn"]),
    "factor of other shape": (
        lambda m, x: F.relu(m.bn1d(m.linear(x) * m.scale[None])),
        ["bn relu"],
    ),
    "constant factor": (lambda m, x: F.relu(m.bn1d(m.linear(x) * 2.0)), ["bn relu"]),
    "square": (lambda m, x: F.relu(m.bn1d((z := m.linear(x)) * z)), ["bn relu"]),
    "sum": (lambda m, x: F.relu(m.bn1d(m.linear(x)) + x[:, :CHANNELS]), ["linear bn"]),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name):
    function, expected = LINEAR[name]
    check(Model(function), rows(), expected)


def test_linear_of_three_dimensions():
    check(Model(lambda m, x: F.relu(m.bn1d(m.linear(x)))), rows(3, 4, 6), ["bn relu"])
