"""The definition of both layers in plain PyTorch: the path of every tensor that our kernels don't take (CPU, float64).

Everything but the matrix product, which is PyTorch's in the input's dtype, is computed in float64, so it adds little
more than y's own rounding, whatever the mean. Differentiable, also twice. Running buffers and the counter are updated
in place in training.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


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
) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over dim 1 of x [N, C, ...]; y has x's dtype and memory format.

    The mean and the (biased) variance are the batch's in training or without running statistics, else the running ones.
    momentum None: cumulative average over num_batches_tracked.
    """
    channels_shape = [1, -1] + [1] * (x.dim() - 2)
    wide = x.double()
    if training or running_mean is None or running_var is None:
        if training and num_batches_tracked is not None:
            num_batches_tracked.add_(1)
        if x.numel() == 0:
            return _scale_and_shift(wide, weight, bias, channels_shape).to(x.dtype)
        var, mean = torch.var_mean(wide, [d for d in range(x.dim()) if d != 1], correction=0)
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.size(1)
            _update_running(running_mean, running_var, num_batches_tracked, mean, var, count, momentum)
    else:
        mean, var = running_mean.double(), running_var.double()
    invstd = torch.rsqrt(var + eps)
    gain = invstd if weight is None else invstd * weight.double()
    return _scale_and_shift(wide - mean.view(channels_shape), gain, bias, channels_shape).to(x.dtype)


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
    """activation(BatchNorm1d(scale * (x weight^T + bias))) of x [M, K] and weight [N, K]; the rest is [N] or absent.

    y [M, N] has the dtype that the separate modules return, autocast included: the Linear's output promoted with scale.
    """
    u = F.linear(x, weight)
    dtype = u.dtype if scale is None else torch.promote_types(u.dtype, scale.dtype)
    wide = u.double()
    gain = torch.ones((), dtype=wide.dtype, device=u.device) if scale is None else scale.double()
    offset = torch.zeros((), dtype=wide.dtype, device=u.device) if bias is None else bias.double()
    if training or running_mean is None or running_var is None:
        if training and num_batches_tracked is not None:
            num_batches_tracked.add_(1)
        if u.numel() == 0:
            z = (wide + offset) * gain  # no element, but connected to every input that asks for a gradient
            return _scale_and_shift(z, gamma, beta, [1, -1]).to(dtype)
        # The bias cancels in y: moments of u alone, so that a large bias can't hurt them.
        var, mean = torch.var_mean(wide, 0, correction=0)
        centred, var_z = (wide - mean) * gain, var * gain.square()
        if bias is not None:
            centred = centred + (offset - offset)  # its gradient is zero, not missing
        if running_mean is not None and running_var is not None:
            mean_z = (mean + offset) * gain
            _update_running(running_mean, running_var, num_batches_tracked, mean_z, var_z, u.size(0), momentum)
    else:
        centred, var_z = wide * gain + (offset * gain - running_mean.double()), running_var.double()
    invstd = torch.rsqrt(var_z + eps)
    gain = invstd if gamma is None else invstd * gamma.double()
    return ACTIVATIONS[activation](_scale_and_shift(centred, gain, beta, [1, -1])).to(dtype)


def _scale_and_shift(x: Tensor, gain: Tensor | None, shift: Tensor | None, shape: list[int]) -> Tensor:
    if gain is not None:
        x = x * gain.double().view(shape)
    if shift is not None:
        x = x + shift.double().view(shape)
    return x


@torch.no_grad()  # and detached below: no_grad lets the tangents of forward-mode differentiation through
def _update_running(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: int,
    momentum: float | None,
) -> None:
    """running <- (1 - f) * running + f * batch, with f = momentum, or 1 / num_batches_tracked where that is None."""
    if momentum is not None:
        factor: float | Tensor = momentum
    elif num_batches_tracked is not None:
        factor = 1.0 / num_batches_tracked.double()
    else:
        raise ValueError("momentum None is an average over num_batches_tracked, which is not given")
    unbiased = var * (count / max(count - 1, 1))
    for running, batch in ((running_mean, mean), (running_var, unbiased)):
        running.copy_((1.0 - factor) * running.double() + factor * batch.detach())
