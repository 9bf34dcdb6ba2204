"""SyncBatchNorm: statistics of all processes, and what follows fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._fusible import NORMS
from ._group import InGroup
from ._leaf import Leaf
from .batch_norm import ActivatedBatchNorm


class SyncBatchNorm(ActivatedBatchNorm, InGroup, _BatchNorm, Leaf):
    """`torch.nn.SyncBatchNorm` and what follows it, y = activation(BatchNorm(input) + residual): in
    training the statistics of all processes of a group, also on the CPU. One collective forward,
    one backward.

    It is no subclass of torch's, which DistributedDataParallel refuses on the CPU. Without
    torch.distributed, in a group of one, in eval and with frozen statistics it is BatchNorm. All
    processes must call it alike; a rank may have no rows. The parameters' gradients are each
    rank's own, as torch's are: DistributedDataParallel averages them. Mean and variance of all
    values are merged by Chan's formula in float64, and have the same bits on every rank. On CUDA
    the parts between the collectives are PyTorch's operations as yet.

    Args:
        process_group: None for the world, "world", a ProcessGroup, a one-dimensional DeviceMesh or
            the name of a group, looked up in each forward. An attribute that may be changed. Copies
            keep it; pickle stores its name.
        activation: None, "relu", "leaky_relu" (slope 0.01), "gelu" (the erf form) or "silu".
        others: as torch.nn.SyncBatchNorm.

    Shape:
        input [N, C, ...], of any rank from 2 on, float32, float16, bfloat16 or float64; output the
        same, in the same memory format. residual, which may be left out: of input's shape and dtype
        (autocast casts it). Statistics are float32, or float64 of float64.

    Raises:
        TypeError: process_group is no group.
        ValueError: an unknown activation; an input of fewer dimensions, or without channels; one
            value per channel over all ranks, on each of them, before anything has changed. On CUDA
            and in graphs, where to ask would synchronise, y is activation(bias + residual) then,
            and buffers stay as they are, as they do where no rank has rows.
        RuntimeError: as BatchNorm2d; a name that no group has.
        NotImplementedError: a tensor subclass (DTensor) in training over several ranks.

    Recomputation under activation checkpoints takes the same collectives and updates buffers again,
    as torch's does. Gradients of gradients take more collectives, on all ranks alike.
    """

    is_synchronised = True
    convert_sync_batchnorm: ClassVar[Callable[..., Any]]  # set in convert, a layer above

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        **others: Any,
    ) -> None:
        options = {"device": device, "dtype": dtype, "activation": activation, **others}
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")


NORMS.add(SyncBatchNorm)
SYNCHRONISED: tuple[Any, ...] = (nn.SyncBatchNorm, SyncBatchNorm)
