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
