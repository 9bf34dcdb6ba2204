"""Batch normalisation as a function: which implementation runs, and torch's errors for the mistakes torch reports."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import reference
from .._library import require
from ..ops import batch_norm as ops

_below_autograd = ops.below_autograd
TRANSFORMED = "torch.func or forward-mode differentiation is active"
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_VECTOR_NAMES = ("running_mean", "running_var", "weight", "bias")


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`torch.nn.functional.batch_norm`: y = (x - mean) / sqrt(var + eps) * weight + bias over dim 1 of input.

    Args:
        input: float32, float16, bfloat16 (CUDA kernels) or float64, [N, C, ...].
        running_mean, running_var: [C], or both None in training. Updated in place in training.
        weight, bias: [C], or None for 1 and 0.
        training: normalise with the statistics of input instead of the running ones.

    Returns:
        y, with input's shape, dtype and memory format.

    Raises:
        ValueError: one value per channel in training; eps not positive in training, or negative; only one of the
            running statistics in training, or running_mean alone.
        RuntimeError: fewer than 2 dimensions; a tensor of the wrong size or device; no running_mean in evaluation mode;
            a CUDA input without the compiled library.
        NotImplementedError: an input of another dtype.
    """
    return batch_norm_with_counter(input, running_mean, running_var, weight, bias, training, momentum, eps, None)


def batch_norm_with_counter(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    num_batches_tracked: Tensor | None,
) -> Tensor:
    """`batch_norm` that also counts the batch in training. momentum None: cumulative average over the counter."""
    if input.dim() < 2:
        raise RuntimeError(f"expected an input of shape [N, C, ...], got {tuple(input.shape)}")
    if training:
        if input.size(0) == 1 and input.shape[2:].numel() == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        if eps <= 0.0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    elif running_mean is None:
        raise RuntimeError("running_mean must be defined in evaluation mode")
    elif eps < 0.0:
        raise ValueError(f"batch_norm eps must be non-negative, but got {eps}")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")

    reason = reason_for_reference(input, running_mean, running_var, weight, bias)
    if training or reason is not None:
        _check(input, running_mean, running_var, weight, bias)
    if reason is not None:
        return reference.batch_norm(
            input, running_mean, running_var, num_batches_tracked, weight, bias, training, momentum, eps
        )
    require()
    if not input.is_contiguous():
        input = _dense(input)
    weight, bias = contiguous(weight), contiguous(bias)
    wants_grad = torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
    statistics = (running_mean, running_var)
    if training:
        arguments = (input, *statistics, num_batches_tracked, weight, bias, momentum, eps)
        if torch.compiler.is_compiling():
            return ops.batch_norm_training(*arguments)[0]
        if wants_grad:
            return ops.differentiable_training(*arguments)[0]
        with _below_autograd():
            return ops.batch_norm_training(*arguments)[0]
    if torch.compiler.is_compiling():
        return ops.batch_norm_inference(input, *statistics, weight, bias, eps)
    if wants_grad:
        return ops.differentiable_inference(input, *statistics, weight, bias, eps)
    with _below_autograd():
        return ops.batch_norm_inference(input, *statistics, weight, bias, eps)


def reason_for_reference(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *parameters: Tensor | None
) -> str | None:
    """Why the call runs in plain PyTorch (cutlass_bn.reference), or None where our kernels take it."""
    if not input.is_cuda:
        return f"the input is on {input.device.type}"
    if input.dtype not in KERNEL_DTYPES:
        return f"the input is {str(input.dtype).removeprefix('torch.')}"
    for vector in (running_mean, running_var, *parameters):
        if vector is not None and vector.dtype not in KERNEL_DTYPES:
            return "a parameter or running statistic is not float32, float16 or bfloat16"
    for buffer in (running_mean, running_var):
        if buffer is not None and not buffer.is_contiguous():
            return "the running statistics are not contiguous"
    return TRANSFORMED if is_transformed() else None


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work: for those the ops have no rules."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def contiguous(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


def is_channels_last(input: Tensor) -> bool:
    """Whether the kernels take an input that is not contiguous, or the dense copy that they get, as channels_last."""
    return input.movedim(1, -1).is_contiguous() or (input.dim() > 2 and input.stride(1) == 1 and input.size(1) > 1)


def _dense(input: Tensor) -> Tensor:
    """input itself where the kernels take it, else a copy in the memory format that its strides suggest."""
    if input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
        return input
    channels_last = input.movedim(1, -1)
    if channels_last.is_contiguous():
        return input
    return channels_last.contiguous().movedim(-1, 1) if is_channels_last(input) else input.contiguous()


def _check(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """What torch's own function checks, with its types of errors."""
    if input.dtype not in (*KERNEL_DTYPES, torch.float64):
        raise NotImplementedError(f'"batch_norm" not implemented for {input.dtype}')
    expected, device = (input.size(1),), input.device
    for name, vector in zip(_VECTOR_NAMES, (running_mean, running_var, weight, bias), strict=True):
        if vector is None:
            continue
        if vector.shape != expected:
            raise RuntimeError(f"{name} should contain {input.size(1)} elements, got shape {tuple(vector.shape)}")
        if vector.device != device:
            raise RuntimeError(f"{name} should be on {device} like input, is on {vector.device}")
