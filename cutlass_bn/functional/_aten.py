"""Both layers in PyTorch's own functions, as torch.nn calls them: for graphs that run without us
(_policy.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._activations import ACTIVATIONS


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    def followed(y: Tensor) -> Tensor:
        return ACTIVATIONS[activation].forward(y if residual is None else y + residual)

    if not training or num_batches_tracked is None:
        assert momentum is not None
        vectors = running_mean, running_var, weight, bias
        return followed(F.batch_norm(input, *vectors, training, momentum, eps))
    if momentum is not None or running_mean is None or running_var is None:
        y = F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum or 0.0, eps)
        num_batches_tracked.add_(1)
        return followed(y)
    # A momentum that depends on a tensor would have to be read for F.batch_norm, which no graph can
    # hold: let the batch's statistics take the place of copies, and average then. (An empty batch
    # leaves the copies as they are.)
    mean, var = running_mean.clone(), running_var.clone()
    y = F.batch_norm(input, mean, var, weight, bias, True, 1.0, eps)
    num_batches_tracked.add_(1)
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    factor = num_batches_tracked.to(device=mean.device, dtype=wide).reciprocal()
    running_mean.add_((mean - running_mean) * factor)
    running_var.add_((var - running_var) * factor)
    return followed(y)


def linear_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    activation: str | None,
) -> Tensor:
    z = F.linear(input, weight, bias)
    if scale is not None:
        z = z * scale
    vectors = running_mean, running_var, num_batches_tracked, gamma, beta
    return batch_norm(z, *vectors, training, momentum, eps, activation)
