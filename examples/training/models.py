"""An MLP and a small ResNet of cutlass_bn's modules or torch's, otherwise the same to the weight.

The activation is SiLU because it is smooth. At ReLU's kink a difference of one rounding can switch
an element's gradient on or off; two float32 trainings then drift apart after some tens of steps,
torch from torch as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d

MODELS = ("MLP", "ResNet")
CLASSES = 10

Norm2d = Callable[[int], nn.Module]


def build(name: str, ours: bool) -> nn.Module:
    """MODELS[name] of our modules or torch's. Both draw equal random numbers in equal order."""
    if name == "MLP":
        return mlp(linear_norm_silu if ours else torch_linear_norm_silu)
    return ResNet(BatchNorm2d if ours else nn.BatchNorm2d)


def linear_norm_silu(inputs: int, outputs: int) -> nn.Module:
    return LinearBatchNorm1d(inputs, outputs, activation="silu")


def torch_linear_norm_silu(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.SiLU())


def mlp(layer: Callable[[int, int], nn.Module], width: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), layer(64, width), layer(width, width), nn.Linear(width, CLASSES)
    )


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class Block(nn.Module):
    """Two 3x3 convolutions, each followed by a batch norm, beside a shortcut."""

    def __init__(self, norm: Norm2d, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv3x3(inputs, outputs, stride),
            norm(outputs),
            nn.SiLU(),
            conv3x3(outputs, outputs),
            norm(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """For [N, 1, 8, 8]: a stem and three blocks, 16, 32 and 64 channels wide."""

    def __init__(self, norm: Norm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv3x3(1, 16), norm(16), nn.SiLU())
        self.blocks = nn.Sequential(
            Block(norm, 16, 16, 1), Block(norm, 16, 32, 2), Block(norm, 32, 64, 2)
        )
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))
