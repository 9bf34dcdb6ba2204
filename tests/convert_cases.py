"""Models for convert, and what tells of fused calls."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cutlass_bn.convert import _sequential

IMAGE = (4, 3, 6, 6)


def images() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))


def features(activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), activation or nn.SiLU(), nn.Linear(4, 2)
    )


class Named(nn.Sequential):
    """As torchvision's Conv2dNormActivation: a subclass that inherits the forward."""

    def __init__(self) -> None:
        super().__init__(*images())
        self.out_channels = 4


class Doubling(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def hook(*args: object) -> None:
    return None


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model twice, with parameters other than 1 and 0."""
    theirs = make()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(0.5, 2.0)
    return copy.deepcopy(theirs), theirs


def assert_same(ours: nn.Module, theirs: nn.Module, *shape: int) -> None:
    """Output, gradients and state of both modes."""
    for training in (True, False):
        results = []
        x = torch.randn(shape)
        for model in (ours.train(training), theirs.train(training)):
            input = x.clone().requires_grad_()
            y = model(input)
            weights = torch.linspace(-1, 1, y.numel()).view_as(y)
            gradients = torch.autograd.grad((y * weights).sum(), [input, *model.parameters()])
            results.append((y, *gradients, *model.state_dict().values()))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused calls that an nn.Sequential makes from now on."""
    made: list[str] = []
    normalise, linear = _sequential.normalise, _sequential.functional.linear_batch_norm

    def noting_norm(norm, input, residual, activation):
        made.append(f"BatchNorm + {activation}")
        return normalise(norm, input, residual, activation)

    def noting_linear(*args, activation=None, **kwargs):
        made.append(f"Linear + BatchNorm + {activation}")
        return linear(*args, activation=activation, **kwargs)

    monkeypatch.setattr(_sequential, "normalise", noting_norm)
    monkeypatch.setattr(_sequential.functional, "linear_batch_norm", noting_linear)
    return made
