"""KernelBench level 1, problem 33: BatchNorm2d in training; the new model is cutlass_bn's."""

import torch
from torch import Tensor, nn

import cutlass_bn


class Model(nn.Module):
    """Batch normalisation over the channels of an image."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(num_features=num_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x)


class ModelNew(nn.Module):
    """The same; only the class of `bn` differs."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.bn = cutlass_bn.BatchNorm2d(num_features=num_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x)


batch_size = 64
features = 64
dim1 = 512
dim2 = 512

# run.py's sizes for a machine without a GPU
REDUCED = {"batch_size": 4, "features": 16, "dim1": 64, "dim2": 64}


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, features, dim1, dim2)]


def get_init_inputs() -> list:
    return [features]
