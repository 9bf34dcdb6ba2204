"""The definition of both layers in plain PyTorch: what the tests compare with, and what runs where
nothing faster may (float64 on CUDA, torch.func, forward-mode differentiation, gradients of
gradients).

Everything but the matrix product, which is PyTorch's in the input's dtype, is computed in float64,
so it adds little more than y's own rounding, whatever the mean. Differentiable, also twice. Running
buffers and the counter are updated in place in training.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._activations import ACTIVATIONS

HALVES = (torch.float16, torch.bfloat16)


def batch_norm(
    x: Tensor,
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
    """act((x - mean) / sqrt(var + eps) * weight + bias + residual) over dim 1 of x [N, C, ...].

    It has x's dtype and memory format.

    The mean and the (biased) variance are the batch's in training or without running statistics,
    else the running ones.
    momentum None: cumulative average over num_batches_tracked.
    """
    channels_shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x.double()

    def finished(centred: Tensor, gain: Tensor | None) -> Tensor:
        v = _scale_and_shift(centred, gain, bias, channels_shape)
        v = v if residual is None else v + residual.double()
        return ACTIVATIONS[activation].forward(v).to(x.dtype)

    if training or running_mean is None or running_var is None:
        if not training:
            num_batches_tracked = None
        if x.numel() == 0:
            _count(num_batches_tracked)
            return finished(wide, weight)
        var, mean = torch.var_mean(wide, [d for d in range(x.dim()) if d != 1], correction=0)
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.size(1)
            _update_running(
                running_mean, running_var, num_batches_tracked, mean, var, count, momentum
            )
        _count(num_batches_tracked)
    else:
        mean, var = running_mean.double(), running_var.double()
    invstd = torch.rsqrt(var + eps)
    gain = invstd if weight is None else invstd * weight.double()
    return finished(wide - mean.view(channels_shape), gain)


def linear_batch_norm(
    x: Tensor,
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
    eps: float | Tensor,
    activation: str | None,
) -> Tensor:
    """activation(BatchNorm1d(scale * (x weight^T + bias))) of x [M, K] and weight [N, K]; the rest
    is [N] or absent.

    y [M, N] has the dtype that the separate modules return, autocast included: the Linear's output
    promoted with scale. In float16 and bfloat16 the bias belongs to what the Linear rounds, else it
    is kept out of the moments.
    """
    of_batch = training or running_mean is None or running_var is None
    rounds_bias = bias is not None and autocast_dtype(x) in HALVES
    # The bias cancels in y, so with the batch's statistics it gets a gradient of zero, not one of
    # roundings.
    u = F.linear(
        x, weight, None if not rounds_bias or bias is None else bias.detach() if of_batch else bias
    )
    dtype = u.dtype if scale is None else torch.promote_types(u.dtype, scale.dtype)
    wide = u.double()
    gain = torch.ones((), dtype=wide.dtype, device=u.device) if scale is None else scale.double()
    offset = (
        torch.zeros((), dtype=wide.dtype, device=u.device)
        if bias is None or rounds_bias
        else bias.double()
    )
    if of_batch or running_mean is None or running_var is None:  # the latter for the type checker
        if not training:
            num_batches_tracked = None
        if bias is not None:
            zero = bias.double() - bias.double()
        if u.numel() == 0:
            _count(num_batches_tracked)
            z = (
                wide if bias is None else wide + zero
            ) * gain  # connected to every input that asks for a gradient
            return _scale_and_shift(z, gamma, beta, [1, -1]).to(dtype)
        # Moments of u alone where the bias is not in it, so that a large bias can't hurt them.
        var, mean = torch.var_mean(wide, 0, correction=0)
        centred, var_z = (wide - mean) * gain, var * gain.square()
        if bias is not None:
            centred = centred + zero  # a gradient of zero, not a missing one
        if running_mean is not None and running_var is not None:
            mean_z = (mean + offset) * gain
            _update_running(
                running_mean, running_var, num_batches_tracked, mean_z, var_z, u.size(0), momentum
            )
        _count(num_batches_tracked)
    else:
        centred, var_z = wide * gain + (offset * gain - running_mean.double()), running_var.double()
    invstd = torch.rsqrt(var_z + eps)
    gain = invstd if gamma is None else invstd * gamma.double()
    return ACTIVATIONS[activation].forward(_scale_and_shift(centred, gain, beta, [1, -1])).to(dtype)


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which torch.nn.functional.linear takes this argument, torch.autocast
    considered."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensor.dtype
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def _scale_and_shift(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, shape: list[int]
) -> Tensor:
    if gain is not None:
        x = x * gain.double().view(shape)
    if shift is not None:
        x = x + shift.double().view(shape)
    return x


def _update_running(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: int,
    momentum: float | None,
) -> None:
    """running <- (1 - f) * running + f * batch, with f = momentum or, where that is None, 1 / the
    number of batches.

    num_batches_tracked doesn't count this batch yet. Statistics of the batch are detached, not
    computed under no_grad: that would let the tangents of forward-mode differentiation through.
    """
    if momentum is not None:
        factor: float | Tensor = momentum
    elif num_batches_tracked is not None:
        factor = 1.0 / (num_batches_tracked.double() + 1.0)
    else:
        raise ValueError("momentum None is an average over num_batches_tracked, which is not given")
    unbiased = var * (count / max(count - 1, 1))
    for running, batch in ((running_mean, mean), (running_var, unbiased)):
        running.copy_((1.0 - factor) * running.double() + factor * batch.detach())


def _count(num_batches_tracked: Tensor | None) -> None:
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
