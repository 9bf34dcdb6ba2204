from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._activations import CODES, check_activation
from .._library import require
from ..ops import linear_batch_norm as ops
from ..reference import autocast_dtype
from . import _aten, _sync_batch_norm
from ._collectives import resolve
from ._mistakes import refuse_channels, refuse_device, refuse_dtype
from ._policy import (
    autocast,
    choose,
    contiguous,
    fp32_products,
    is_traced,
    output_dtype,
    plain_counter,
    settle_counter,
    wants_grad,
)

_VECTOR_NAMES = ("bias", "scale", "running_mean", "running_var", "gamma", "beta")


def linear_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    activation: str | None = None,
    *,
    num_batches_tracked: Tensor | None = None,
    ieee_fp32: bool = False,
    process_group: Any = None,
) -> Tensor:
    """activation(batch_norm(scale * linear(input, weight, bias))), differentiable (also twice) in
    input and all parameters.

    Args:
        input: [M, K], float32, float16, bfloat16 or float64.
        weight: [N, K], of input's dtype (autocast casts both, and bias).
        bias: [N], of weight's dtype. In float16 and bfloat16 it belongs to the product that is
            rounded, as in linear.
        scale: [N], a factor per feature before the normalisation.
        running_mean, running_var: [N]. Updated in place in training; otherwise what is normalised
            with.
        gamma, beta: [N], the affine map after the normalisation.
        training: normalise with the batch's own mean and (biased) variance. So it is, too, without
            running statistics.
        momentum: weight of the batch in the running statistics; None: 1 / num_batches_tracked, a
            cumulative average, or 0 without that counter.
        eps: added to the variance.
        activation: None, "relu", "leaky_relu" (slope 0.01), "gelu" (the erf form) or "silu".
        num_batches_tracked: one number, incremented in training; of any dtype, and on any device.
        ieee_fp32: make float32 products by cuBLAS SGEMM. Otherwise they are made, on a Hopper GPU,
            where that is faster and K is at least 64, by an emulation of fp32 by three fp16
            products on the tensor cores. It is deterministic and keeps SGEMM's error bound
            (docs/numerics.md). Where PyTorch may use TF32, TF32 it is in either case.
        process_group: None, or whose statistics are taken together in training: "world", a
            ProcessGroup, a one-dimensional DeviceMesh or the name of a group. The product is
            PyTorch's then.

    Returns:
        [M, N], contiguous. Its dtype is that of linear's output promoted with scale's, as in the
        separate operations.

    Raises:
        ValueError: input is not 2-D; one row to take statistics of; eps not positive with the
            batch's statistics, or negative; an unknown activation. Nothing has changed then.
        RuntimeError: shapes, dtypes or devices that don't fit; only one of the running statistics;
            a CUDA tensor without the compiled library.
        NotImplementedError: an input that is not floating-point.
    """
    of_batch = training or running_mean is None
    if activation not in CODES:
        check_activation(activation)
    if eps < 0.0 or (of_batch and eps == 0.0):
        raise ValueError(
            f"batch_norm eps must be positive in training and not negative in evaluation, got {eps}"
        )
    if (running_mean is None) != (running_var is None):
        raise RuntimeError("running_mean and running_var: expected both or neither")
    if momentum is None and num_batches_tracked is None:
        momentum = 0.0  # nothing to average over: leave the running statistics alone, as torch does
    if not training:
        num_batches_tracked = None
    statistics = (running_mean, running_var)
    vectors = (bias, scale, *statistics, gamma, beta)
    group = resolve(process_group) if training and process_group is not None else None
    if group is not None:
        _check(input, weight, vectors, of_batch=False)
        buffers = (*statistics, num_batches_tracked)
        layer = input, weight, bias, scale, buffers, gamma, beta
        return _sync_batch_norm.linear_batch_norm(*layer, momentum, eps, activation, group)
    dtype = output_dtype(input, scale)
    path = choose(input, dtype, (*statistics, gamma, beta, bias, scale))
    traced = is_traced()
    if path == "kernels":
        require()
    odd = not weight.is_cuda or (bias is not None and bias.dtype != weight.dtype)
    if path != "kernels" or traced or odd:  # the ops would take these
        _check(input, weight, vectors, of_batch)
    if path == "torch" or path == "reference":
        function = _aten.linear_batch_norm if path == "torch" else reference.linear_batch_norm
        buffers = *statistics, num_batches_tracked
        return function(
            input, weight, bias, scale, *buffers, gamma, beta, training, momentum, eps, activation
        )
    kernels = ops.CPU if path == "cpu" else ops.CUDA
    try:
        x, w, b = input, weight, bias
        if torch.is_autocast_enabled("cpu" if path == "cpu" else "cuda"):
            x, w, b = autocast(input), autocast(weight), None if bias is None else autocast(bias)
        operands = x, w, contiguous(b), contiguous(scale)
        affine = contiguous(gamma), contiguous(beta)
        last = eps, CODES[activation], dtype, fp32_products(x, ieee_fp32)
        how = traced, wants_grad(*operands, *affine)
        if not of_batch:
            return kernels.inference((*operands, *statistics, *affine, *last), *how)
        counter, momentum = plain_counter(num_batches_tracked, momentum, input)
        y = kernels.training((*operands, *statistics, counter, *affine, momentum, *last), *how)
    except RuntimeError:
        _check(input, weight, vectors, of_batch)  # says what the op can't
        raise
    if counter is not num_batches_tracked:
        settle_counter(num_batches_tracked, counter)
    return y


def _check(
    input: Tensor, weight: Tensor, vectors: tuple[Tensor | None, ...], of_batch: bool
) -> None:
    """Names who is wrong where the arguments don't fit together."""
    if input.dim() != 2:
        raise ValueError(f"expected 2D input (got {input.dim()}D input)")
    if not input.is_floating_point():
        raise NotImplementedError(f"input: expected a floating-point tensor, got {input.dtype}")
    rows, features = input.shape
    if weight.dim() != 2:
        raise RuntimeError(f"weight: expected shape [N, {features}], got {list(weight.shape)}")
    channels, device = weight.size(0), input.device
    if weight.size(1) != features:  # which of the two is wrong, nothing else can tell
        raise RuntimeError(
            f"input: expected shape [M, {weight.size(1)}] like weight, got {list(input.shape)} "
            f"(or weight: expected shape [N, {features}] like input, got {list(weight.shape)})"
        )
    bias = vectors[0]
    expected, fits = (channels,), weight.device == device
    for vector in vectors:
        fits = fits and (vector is None or (vector.shape == expected and vector.device == device))
    if not fits:
        pairs = zip(_VECTOR_NAMES, vectors, strict=True)
        named = {name: v for name, v in pairs if v is not None}
        if any(v.shape != expected for v in named.values()):
            refuse_channels(named, "weight", weight, 0)
        refuse_device({"weight": weight, **named, "input": input})
    dtype = input.dtype
    for operand in (weight, bias):
        if operand is None or operand.dtype == dtype:
            continue
        if autocast_dtype(operand) != autocast_dtype(input):
            operands = {"weight": weight, "bias": bias, "input": input}
            refuse_dtype({name: t for name, t in operands.items() if t is not None}, autocast_dtype)
    if of_batch and rows == 1:
        size = torch.Size([1, channels])
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {size}"
        )
