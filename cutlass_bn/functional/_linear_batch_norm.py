from __future__ import annotations

import torch
from torch import Tensor

from .. import _library, reference
from .._activations import CODES, check_activation
from ..ops import linear_batch_norm as ops
from ..ops.batch_norm import below_autograd as _below_autograd
from ..reference import autocast_dtype
from . import _aten
from ._mistakes import refuse_channels, refuse_device, refuse_dtype
from ._policy import autocast, choose, contiguous, fp32_products, is_traced, output_dtype, plain_counter, settle_counter

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
) -> Tensor:
    """activation(batch_norm(scale * linear(input, weight, bias))), differentiable (also twice) in input
    and all parameters.

    Args:
        input: [M, K], float32, float16, bfloat16 or float64.
        weight: [N, K], of input's dtype (autocast casts both, and bias).
        bias: [N], of weight's dtype. In float16 and bfloat16 it belongs to the product that is rounded, as in linear.
        scale: [N], a factor per feature before the normalisation.
        running_mean, running_var: [N]. Updated in place in training; otherwise what is normalised with.
        gamma, beta: [N], the affine map after the normalisation.
        training: normalise with the batch's own mean and (biased) variance. So it is, too, without running statistics.
        momentum: weight of the batch in the running statistics; None: 1 / num_batches_tracked, a cumulative average, or
            0 without that counter.
        eps: added to the variance.
        activation: None, "relu", "leaky_relu" (slope 0.01), "gelu" (the erf form) or "silu".
        num_batches_tracked: one number, incremented in training; of any dtype, and on any device.
        ieee_fp32: make float32 products by cuBLAS SGEMM. Otherwise they are made, on a Hopper GPU, where that is faster
            and K is at least 64, by an emulation of fp32 by three fp16 products on the tensor cores. It is
            deterministic and keeps SGEMM's error bound (docs/numerics.md). Where PyTorch may use TF32, TF32 it is in
            either case.

    Returns:
        [M, N], contiguous. Its dtype is that of linear's output promoted with scale's, as in the separate operations.

    Raises:
        ValueError: input is not 2-D; one row to take statistics of; eps not positive with the batch's statistics, or
            negative; an unknown activation. Nothing has changed then.
        RuntimeError: shapes, dtypes or devices that don't fit; only one of the running statistics; a CUDA tensor
            without the compiled library.
        NotImplementedError: an input that is not floating-point.
    """
    vectors = (bias, scale, running_mean, running_var, gamma, beta)
    of_batch = training or running_mean is None
    _check(input, weight, vectors, of_batch, eps, activation)
    if momentum is None and num_batches_tracked is None:
        momentum = 0.0  # nothing to average over: as torch.nn.BatchNorm1d, leave the running statistics alone
    if not training:
        num_batches_tracked = None
    buffers = (running_mean, running_var)
    dtype = output_dtype(input, scale)
    path = choose(input, dtype, *buffers, gamma, beta, bias, scale)
    if path == "torch" or path == "reference":
        function = _aten.linear_batch_norm if path == "torch" else reference.linear_batch_norm
        return function(
            input, weight, bias, scale, *buffers, num_batches_tracked, gamma, beta, training, momentum, eps, activation
        )
    if path == "kernels":
        _library.require()
    kernels = ops.CPU if path == "cpu" else ops.CUDA
    if torch.is_autocast_enabled("cpu" if path == "cpu" else "cuda"):
        input, weight, bias = autocast(input), autocast(weight), None if bias is None else autocast(bias)
    bias, scale, gamma, beta = contiguous(bias), contiguous(scale), contiguous(gamma), contiguous(beta)
    code, products = CODES[activation], fp32_products(input, ieee_fp32)
    traced = path == "kernels" and is_traced()
    wants_grad = _wants_grad(input, weight, bias, scale, gamma, beta)
    if not of_batch:
        arguments = (input, weight, bias, scale, *buffers, gamma, beta, eps, code, dtype, products)
        if traced:
            return ops.inference(*arguments)
        if wants_grad:
            return kernels.differentiable_inference(*arguments)
        with _below_autograd():
            return kernels.inference(*arguments)
    counter, momentum = plain_counter(num_batches_tracked, momentum, input.device)
    if traced:  # an op that mutates cannot have a gradient
        constants = tuple(None if t is None else t.detach() for t in (input, weight, bias, scale))
        u, stats = ops.stats(*constants, *buffers, counter, momentum, eps, products)
    else:
        with _below_autograd():
            u, stats = kernels.stats(input, weight, bias, scale, *buffers, counter, momentum, eps, products)
    if counter is not num_batches_tracked:
        settle_counter(num_batches_tracked, counter)
    arguments = (input, weight, bias, scale, gamma, beta, u, stats, eps, code, dtype, products)
    if traced:
        return ops.transform(*arguments)
    if wants_grad:
        return kernels.differentiable_transform(*arguments)
    with _below_autograd():
        return kernels.transform(*arguments)


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check(
    input: Tensor,
    weight: Tensor,
    vectors: tuple[Tensor | None, ...],
    of_batch: bool,
    eps: float,
    activation: str | None,
) -> None:
    check_activation(activation)
    if input.dim() != 2:
        raise ValueError(f"expected 2D input (got {input.dim()}D input)")
    if not input.is_floating_point():
        raise NotImplementedError(f"input: expected a floating-point tensor, got {input.dtype}")
    if eps < 0.0 or (of_batch and eps == 0.0):
        raise ValueError(f"batch_norm eps must be positive in training and not negative in evaluation, got {eps}")
    rows, features = input.shape
    if weight.dim() != 2:
        raise RuntimeError(f"weight: expected shape [N, {features}], got {list(weight.shape)}")
    channels, device = weight.size(0), input.device
    if weight.size(1) != features:  # which of the two is wrong, nothing else can tell
        raise RuntimeError(
            f"input: expected shape [M, {weight.size(1)}] like weight, got {list(input.shape)} "
            f"(or weight: expected shape [N, {features}] like input, got {list(weight.shape)})"
        )
    bias, _, running_mean, running_var, _, _ = vectors
    if (running_mean is None) != (running_var is None):
        raise RuntimeError("running_mean and running_var: expected both or neither")
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
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
