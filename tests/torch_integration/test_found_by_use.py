"""Faults that were found by using models in ways that nobody had written a test for."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from convert_cases import assert_same, features, note_calls, twins
from torch import Tensor, nn
from traced_blocks import SHAPE, Block, block

import cutlass_bn
from cutlass_bn._activations import ACTIVATIONS

OPTIONS = {"inductor": False}


def by_conversion(model: nn.Module) -> nn.Module:
    return cutlass_bn.convert(copy.deepcopy(model), trace=True)


def by_backend(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    model.compile(backend="cutlass_bn", options=OPTIONS)
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradients and state."""
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y, x.grad, *gradients, *model.state_dict().values()]


ways = pytest.mark.parametrize("fused", [by_conversion, by_backend])


def residual_changes_behind(self: Block, x: Tensor) -> Tensor:
    residual = x * 2
    out = F.silu(self.bn1(self.conv1(x)) + residual)
    residual.mul_(3)
    return out + residual


def residual_is_set_behind(self: Block, x: Tensor) -> Tensor:
    residual = x * 2
    out = F.gelu(self.bn1(self.conv1(x)) + residual)
    residual[0] = 0.0
    return out + residual


def view_of_residual_changes_behind(self: Block, x: Tensor) -> Tensor:
    residual = x * 2
    out = F.silu(self.bn1(self.conv1(x)) + residual.view(x.shape))
    F.relu(residual, inplace=True)
    return out + residual


@ways
@pytest.mark.parametrize(
    "forward",
    [residual_changes_behind, residual_is_set_behind, view_of_residual_changes_behind],
)
def test_residual_may_change_once_it_is_added(
    fused: Callable[[nn.Module], nn.Module], forward: Callable[[Block, Tensor], Tensor]
) -> None:
    model, x = block(forward)(), torch.randn(SHAPE)
    torch.testing.assert_close(step(fused(model), x), step(model, x), rtol=1e-4, atol=1e-4)


def residual_first(self: Block, x: Tensor) -> Tensor:
    return self.relu(x + self.bn1(self.conv1(x)))


def residual_second(self: Block, x: Tensor) -> Tensor:
    return self.relu(self.bn1(self.conv1(x)) + x)


@ways
@pytest.mark.parametrize("forward", [residual_first, residual_second])
@pytest.mark.parametrize("of_weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_input", [torch.contiguous_format, torch.channels_last])
def test_sum_lies_as_its_first_operand(
    fused: Callable[[nn.Module], nn.Module],
    forward: Callable[[Block, Tensor], Tensor],
    of_weights: torch.memory_format,
    of_input: torch.memory_format,
) -> None:
    model = block(forward)().to(memory_format=of_weights)  # channels_last: the convolution's, too
    x = torch.randn(SHAPE).contiguous(memory_format=of_input)
    expected = copy.deepcopy(model)(x)
    torch.testing.assert_close(fused(model)(x), expected, check_stride=True)


@pytest.mark.parametrize("cls", [nn.Linear, nn.SiLU, nn.Sequential])
def test_forward_of_a_class_that_is_patched_later(
    cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = twins(features)
    cutlass_bn.convert(ours)
    made = note_calls(monkeypatch)
    before = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, input: before(self, input).abs() + 0.5)
    assert_same(ours, theirs, 8, 3)
    assert "Linear + BatchNorm + silu" not in made
    assert "fused: Linear + BatchNorm1d + SiLU" not in str(cutlass_bn.explain(ours))


@pytest.mark.parametrize("cls", [nn.ReLU, nn.Identity, nn.Conv2d])
def test_forward_of_a_block_with_a_class_that_is_patched_later(
    cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        return self.relu(self.identity(self.bn1(self.conv1(x))) + self.conv2(x))

    ours, theirs = twins(block(forward))
    cutlass_bn.convert(ours, trace=True)
    assert "fused: BatchNorm2d + residual + relu" in str(cutlass_bn.explain(ours))
    before = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, input: before(self, input) * 2)
    x = torch.randn(SHAPE)
    torch.testing.assert_close(step(ours, x), step(theirs, x), rtol=1e-4, atol=1e-4)
    assert ": fused:" not in str(cutlass_bn.explain(ours))


@pytest.mark.parametrize("make", [features, Block])
def test_container_whose_forward_is_patched_later(make: Callable[[], nn.Module]) -> None:
    model = cutlass_bn.convert(make(), trace=True)
    assert "fused" in str(cutlass_bn.explain(model))
    model.forward = lambda input: input * 2
    report = cutlass_bn.explain(model)
    assert "its forward is patched" in str(report)
    own = {name: text for name, text in report.items() if "." not in name}
    assert not any(text.startswith("fused") for text in own.values())
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_not_traced(
    copied: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.fx patches nn.Module meanwhile, under the feet of other threads."""
    model = cutlass_bn.convert(Block(), trace=True)
    with monkeypatch.context() as patches:
        patches.setattr(torch.fx.Tracer, "trace", None)
        new = copied(model)
    assert str(cutlass_bn.explain(new)) == str(cutlass_bn.explain(model))
    assert "residual" in str(cutlass_bn.explain(new))
    x = torch.randn(SHAPE)
    torch.testing.assert_close(new.eval()(x), model.eval()(x))
    new.relu = nn.SiLU()
    assert "has changed" in str(cutlass_bn.explain(new))


class Scaled(Block):
    """Owns a parameter and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(self.conv1(x)) + x) * self.gain + x.long() * self.factor


class Incomparable:
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    def __rmul__(self, other: Tensor) -> Tensor:
        return other * 4


def parameter_as_attribute(model: Scaled) -> None:
    """As in DataParallel's replicas."""
    gain = model.gain.detach() * 2
    del model.gain
    model.gain = gain


@pytest.mark.parametrize(
    "change",
    [
        parameter_as_attribute,
        lambda model: setattr(model, "factor", 2),  # which was 2.0
        lambda model: setattr(model, "factor", torch.rand(3, 1, 1)),
        lambda model: setattr(model, "factor", Incomparable()),
    ],
    ids=["parameter as attribute", "int", "tensor", "incomparable"],
)
def test_attribute_that_becomes_something_else(change: Callable[[nn.Module], None]) -> None:
    ours, theirs = twins(Scaled)
    cutlass_bn.convert(ours, trace=True)
    assert "fused" in cutlass_bn.explain(ours)["bn1"]
    torch.manual_seed(0)
    change(ours)
    torch.manual_seed(0)
    change(theirs)
    x = torch.randn(SHAPE)
    torch.testing.assert_close(ours(x), theirs(x))
    assert "not fused" in cutlass_bn.explain(ours)["bn1"]


def twice(function, *leaves):
    gradients = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    total = sum(gradient.square().sum() for gradient in gradients)
    return [*gradients, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_gradients_of_gradients_where_arguments_depend_on_each_other(training, activation, device):
    after = ACTIVATIONS[activation].forward
    wide = {"dtype": torch.float64, "device": device}
    x, w = (torch.randn(n, 3, **wide).requires_grad_() for n in (8, 3))

    def stats():
        return torch.zeros(3, **wide), torch.ones(3, **wide)

    def ours(x, w):
        gain = x.mean(0)
        y = cutlass_bn.functional.batch_norm(
            x * x, *stats(), gain, gain * 2, training, activation=activation, residual=x
        )
        m = w + x.mean()
        return y + cutlass_bn.functional.linear_batch_norm(
            y, m, m[0], m[1], *stats(), m[2], m.sum(1), training, activation=activation
        )

    def theirs(x, w):
        gain = x.mean(0)
        y = after(F.batch_norm(x * x, *stats(), gain, gain * 2, training) + x)
        m = w + x.mean()
        z = F.linear(y, m, m[0]) * m[1]
        return y + after(F.batch_norm(z, *stats(), m[2], m.sum(1), training))

    torch.testing.assert_close(twice(ours, x, w), twice(theirs, x, w), rtol=1e-7, atol=1e-7)
