"""Batch normalisation as a function, with torch's errors for the mistakes torch reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._activations import CODES, check_activation
from .._library import require
from ..ops import batch_norm as ops
from . import _aten, _sync_batch_norm
from ._collectives import resolve
from ._mistakes import refuse_channels, refuse_device
from ._policy import (
    KERNEL_DTYPES,
    choose,
    contiguous,
    is_traced,
    plain_counter,
    settle_counter,
    wants_grad,
)

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
    process_group: Any = None,
) -> Tensor:
    """activation(y + residual) of `torch.nn.functional.batch_norm`, y = (x - mean) / sqrt(var +
    eps) * weight + bias over dim 1 of input.

    Args:
        input: float32, float16, bfloat16 or float64, [N, C, ...].
        running_mean, running_var: [C], or both None in training. Updated in place in training.
        weight, bias: [C], or None for 1 and 0.
        training: normalise with the statistics of input instead of the running ones.
        activation: None, "relu", "leaky_relu" (slope 0.01), "gelu" (the erf form) or "silu".
        residual: of input's shape and dtype (autocast casts it), in any layout.
        process_group: None, or whose statistics are taken together in training: "world", a
            ProcessGroup, a one-dimensional DeviceMesh or the name of a group. `SyncBatchNorm` says
            more.

    Returns:
        y, with input's shape and dtype, and the strides that torch's own function gives it.

    Raises:
        ValueError: an unknown activation; one value per channel in training; eps not positive in
            training, or negative; only one of the running statistics in training, or running_mean
            alone.
        RuntimeError: fewer than 2 dimensions; a tensor of the wrong size or device; no running_mean
            in evaluation mode; a CUDA input without the compiled library.
        NotImplementedError: an input of another dtype.
    """
    vectors = running_mean, running_var, weight, bias
    return batch_norm_with_counter(
        input, *vectors, training, momentum, eps, None, process_group, activation, residual
    )


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
    process_group: Any = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`batch_norm` that also counts the batch in training.

    momentum None: cumulative average over the counter.
    """
    if activation not in CODES:
        check_activation(activation)
    if training:
        if eps <= 0.0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    elif running_mean is None:
        raise RuntimeError("running_mean must be defined in evaluation mode")
    elif eps < 0.0:
        raise ValueError(f"batch_norm eps must be non-negative, but got {eps}")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if residual is not None:
        residual = _as_input(residual, input)

    statistics = (running_mean, running_var)
    group = resolve(process_group) if training and process_group is not None else None
    if group is not None:
        _check(input, residual, *statistics, weight, bias, training=False)
        buffers = (*statistics, num_batches_tracked)
        options = momentum, eps, activation, group
        return _sync_batch_norm.batch_norm(input, residual, buffers, weight, bias, *options)
    path = choose(input, input.dtype, (*statistics, weight, bias))
    traced = is_traced()
    if path == "kernels":
        require()
    if path == "torch" or path == "reference":
        _check(input, residual, *statistics, weight, bias, training)
        function = _aten.batch_norm if path == "torch" else reference.batch_norm
        vectors = *statistics, num_batches_tracked, weight, bias
        return function(input, *vectors, training, momentum, eps, activation, residual)
    if path == "cpu" or traced:
        _check(input, residual, *statistics, weight, bias, training)
    kernels = ops.CPU if path == "cpu" else ops.CUDA
    weight, bias, code = contiguous(weight), contiguous(bias), CODES[activation]
    how = traced, wants_grad(input, residual, weight, bias)
    try:
        if not training:
            return kernels.inference((input, residual, *statistics, weight, bias, eps, code), *how)
        counter, momentum = plain_counter(num_batches_tracked, momentum, input)
        y = kernels.training(
            (input, residual, *statistics, counter, weight, bias, momentum, eps, code), *how
        )
    except RuntimeError:
        _check(input, residual, *statistics, weight, bias, training)  # says what the op can't
        raise
    if counter is not num_batches_tracked:
        settle_counter(num_batches_tracked, counter)
    return y


def _as_input(residual: Tensor, input: Tensor) -> Tensor:
    """residual in the dtype that it is added in."""
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
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
) -> None:
    """What torch's own function checks, with its types of errors; who is wrong is named."""
    if input.dim() < 2:
        raise RuntimeError(f"expected an input of shape [N, C, ...], got {tuple(input.shape)}")
    # In this order: the batch may be a symbol.
    if training and input.shape[2:].numel() == 1 and input.size(0) == 1:
        size = input.size()
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {size}"
        )
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
    if residual is not None and residual.shape != input.shape:
        fitting, shape = list(input.shape), list(residual.shape)
        raise RuntimeError(f"residual: expected shape {fitting} like input, got {shape}")
