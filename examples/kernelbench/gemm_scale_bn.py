"""KernelBench level 2, problem 39: Linear, scale, BatchNorm1d in training; new is cutlass_bn's."""

import torch
from torch import Tensor, nn

import cutlass_bn


class Model(nn.Module):
    """A matrix product, a scale for each feature, batch normalisation."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale_shape: tuple[int],
        eps: float = 1e-5,
        momentum: float = 0.1,
    ):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gemm(x)
        x = x * self.scale
        return self.bn(x)


class ModelNew(cutlass_bn.LinearBatchNorm1d):
    """In one layer. It draws parameters in the same order: one seed gives both the same weights."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale_shape: tuple[int],
        eps: float = 1e-5,
        momentum: float = 0.1,
    ):
        super().__init__(in_features, out_features, scale=True, eps=eps, momentum=momentum)


batch_size = 16384
in_features = 4096
out_features = 4096
scale_shape = (out_features,)

# run.py's sizes for a machine without a GPU
REDUCED = {"batch_size": 512, "in_features": 256, "out_features": 256, "scale_shape": (256,)}


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, in_features)]


def get_init_inputs() -> list:
    return [in_features, out_features, scale_shape]
