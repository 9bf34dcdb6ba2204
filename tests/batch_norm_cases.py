"""What the tests of batch normalisation share besides the oracle: inputs, described."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    sizes: tuple[int, ...]
    why: str
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def __str__(self) -> str:
        return self.why.replace(" ", "-")

    def randn(self, device: str = "cpu", mean: float = 0.0, std: float = 1.0) -> Tensor:
        x = torch.randn(self.sizes, device=device).mul_(std).add_(mean).to(self.dtype)
        return x.to(memory_format=torch.channels_last) if self.channels_last else x


@dataclass(frozen=True)
class Case(Shape):
    """A shape, and what a layer and its gradient are filled with."""

    mean: float = 0.5
    std: float = 1.5
    grad_mean: float = 0.0
    offset: int = 0  # elements by which the storage misses alignment
    affine: bool = True

    def dense(self, device: str, mean: float, std: float) -> Tensor:
        """Drawn in float64 on the CPU, so the same on every device; of any number of dimensions."""
        dims = list(range(len(self.sizes)))
        order = [0, *dims[2:], 1] if self.channels_last else dims
        values = torch.randn([self.sizes[dim] for dim in order], dtype=torch.float64) * std + mean
        storage = torch.empty(values.numel() + self.offset, dtype=self.dtype, device=device)
        t = storage[self.offset :].view(values.shape).copy_(values)
        return t.permute([order.index(dim) for dim in dims])

    def input(self, device: str) -> Tensor:
        return self.dense(device, self.mean, self.std)

    def gradient(self, device: str) -> Tensor:
        return self.dense(device, self.grad_mean, 1.0)
