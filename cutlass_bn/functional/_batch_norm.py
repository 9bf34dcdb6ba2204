"""Batch normalisation as a function, with torch's errors for the mistakes torch reports."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from .._activations import ACTIVATIONS, check_activation
from .._library import require
from ..ops import batch_norm as ops
from . import _aten
from ._mistakes import refuse_channels, refuse_device
from ._policy import KERNEL_DTYPES, choose, contiguous, dense, is_traced, plain_counter, settle_counter

_below_autograd = ops.below_autograd
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
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.batch_norm`, y = (x - mean) / sqrt(var + eps) * weight + bias over dim 1 of input, and what
    follows it: activation(y + residual).

    Args:
        input: float32, float16, bfloat16 or float64, [N, C, ...].
        running_mean, running_var: [C], or both None in training. Updated in place in training.
        weight, bias: [C], or None for 1 and 0.
        training: normalise with the statistics of input instead of the running ones.
        activation: None, "relu", "leaky_relu" (slope 0.01), "gelu" (the erf form) or "silu".
        residual: of input's shape and dtype (autocast casts it), in any layout.

    Returns:
        y, with input's shape and dtype, and the strides that torch's own function gives it.

    Raises:
        ValueError: an unknown activation; one value per channel in training; eps not positive in training, or
            negative; only one of the running statistics in training, or running_mean alone.
        RuntimeError: fewer than 2 dimensions; a tensor of the wrong size or device; no running_mean in evaluation mode;
            a CUDA input without the compiled library.
        NotImplementedError: an input of another dtype.
    """
    vectors = running_mean, running_var, weight, bias
    return batch_norm_with_counter(input, *vectors, training, momentum, eps, None, activation, residual)


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
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`batch_norm` that also counts the batch in training. momentum None: cumulative average over the counter."""
    if activation is not None or residual is not None:
        check_activation(activation)
        if residual is not None:
            residual = _check_residual(residual, input)
        y = batch_norm_with_counter(
            input, running_mean, running_var, weight, bias, training, momentum, eps, num_batches_tracked
        )
        return ACTIVATIONS[activation].forward(y if residual is None else y + residual)
    if input.dim() < 2:
        raise RuntimeError(f"expected an input of shape [N, C, ...], got {tuple(input.shape)}")
    if training:
        if input.shape[2:].numel() == 1 and input.size(0) == 1:  # in this order: the batch may be a symbol
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        if eps <= 0.0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    elif running_mean is None:
        raise RuntimeError("running_mean must be defined in evaluation mode")
    elif eps < 0.0:
        raise ValueError(f"batch_norm eps must be non-negative, but got {eps}")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")

    _check(input, running_mean, running_var, weight, bias)
    path = choose(input, input.dtype, running_mean, running_var, weight, bias)
    if path == "torch" or path == "reference":
        function = _aten.batch_norm if path == "torch" else reference.batch_norm
        return function(input, running_mean, running_var, num_batches_tracked, weight, bias, training, momentum, eps)
    if path == "kernels":
        require()
    kernels = ops.CPU if path == "cpu" else ops.CUDA
    if not input.is_contiguous():
        input = dense(input)
    weight, bias = contiguous(weight), contiguous(bias)
    traced = path == "kernels" and is_traced()
    wants_grad = torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
    statistics = (running_mean, running_var)
    if training:
        counter, momentum = plain_counter(num_batches_tracked, momentum, input.device)
        arguments = (input, *statistics, counter, weight, bias, momentum, eps)
        if traced:
            y, _ = ops.batch_norm_training(*arguments)
        elif wants_grad:
            y, _ = kernels.differentiable_training(*arguments)
        else:
            with _below_autograd():
                y, _ = kernels.training(*arguments)
        if counter is not num_batches_tracked:
            settle_counter(num_batches_tracked, counter)
        return y
    if traced:
        return ops.batch_norm_inference(input, *statistics, weight, bias, eps)
    if wants_grad:
        return kernels.differentiable_inference(input, *statistics, weight, bias, eps)
    with _below_autograd():
        return kernels.inference(input, *statistics, weight, bias, eps)


def _check_residual(residual: Tensor, input: Tensor) -> Tensor:
    """residual in the dtype that it is added in."""
    if residual.shape != input.shape:
        expected, shape = list(input.shape), list(residual.shape)
        raise RuntimeError(f"residual: expected shape {expected} like input, got {shape}")
    if residual.device != input.device:
        here, there = input.device, residual.device
        raise RuntimeError(f"residual: expected a tensor on {here} like input, got one on {there}")
    if residual.dtype == input.dtype:
        return residual
    if not torch.is_autocast_enabled(input.device.type):
        raise RuntimeError(f"residual: expected {input.dtype} like input, got {residual.dtype}")
    return residual.to(input.dtype)


def _check(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """What torch's own function checks, with its types of errors."""
    if input.dtype not in (*KERNEL_DTYPES, torch.float64):
        known = "float32, float16, bfloat16 or float64"
        text = f"not implemented for {input.dtype}, input: expected {known}"
        raise NotImplementedError(f'"batch_norm" {text}')
    expected, device = (input.size(1),), input.device
    vectors = (running_mean, running_var, weight, bias)
    for vector in vectors:
        if vector is not None and (vector.shape != expected or vector.device != device):
            pairs = zip(_VECTOR_NAMES, vectors, strict=True)
            named = {name: v for name, v in pairs if v is not None}
            if any(v.shape != expected for v in named.values()):
                refuse_channels(named, "input", input, 1)
            refuse_device({**named, "input": input})
