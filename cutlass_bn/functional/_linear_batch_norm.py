from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from .. import _library, reference
from ..ops import linear_batch_norm as ops
from ._batch_norm import _below_autograd, contiguous, reason_for_reference

_as_it_is = nullcontext()
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
        input: [M, K], float32, float16 or bfloat16 (CUDA kernels) or float64.
        weight: [N, K], of input's dtype (autocast casts both, and bias).
        bias: [N], of weight's dtype.
        scale: [N], a factor per feature before the normalisation.
        running_mean, running_var: [N]. Updated in place in training; otherwise what is normalised with.
        gamma, beta: [N], the affine map after the normalisation.
        training: normalise with the batch's own mean and (biased) variance. So it is, too, without running statistics.
        momentum: weight of the batch in the running statistics; None: 1 / num_batches_tracked, a cumulative average, or
            0 without that counter.
        eps: added to the variance.
        activation: None, "relu", "gelu" (the erf form) or "silu".
        num_batches_tracked: one int64, incremented in training.
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
    if reason_for_reference(input, running_mean, running_var, bias, scale, gamma, beta):
        return reference.linear_batch_norm(
            input, weight, bias, scale, running_mean, running_var, num_batches_tracked, gamma, beta,
            training, momentum, eps, activation,
        )  # fmt: skip

    _library.require()
    if torch.is_autocast_enabled("cuda"):
        input, weight, bias = autocast(input), autocast(weight), None if bias is None else autocast(bias)
    bias, scale, gamma, beta = contiguous(bias), contiguous(scale), contiguous(gamma), contiguous(beta)
    code, dtype = ops.ACTIVATION_CODES[activation], output_dtype(input, scale)
    products = fp32_products(input, ieee_fp32)
    if not training:
        num_batches_tracked = None
    buffers = (running_mean, running_var)
    compiling = torch.compiler.is_compiling()
    with _as_it_is if compiling else _below_autograd():
        u = stats = None
        if of_batch:
            constants: tuple[Tensor | None, ...] = (input, weight, bias, scale)
            if compiling:  # an op that mutates cannot have a gradient
                constants = tuple(None if t is None else t.detach() for t in constants)
            u, stats = ops.stats(*constants, *buffers, num_batches_tracked, momentum, eps, products)
        if compiling or not _wants_grad(input, weight, bias, scale, gamma, beta):
            if u is None:
                return ops.inference(input, weight, bias, scale, *buffers, gamma, beta, eps, code, dtype, products)
            return ops.transform(input, weight, bias, scale, gamma, beta, u, stats, eps, code, dtype, products)
    if u is None:
        return ops.differentiable_inference(
            input, weight, bias, scale, *buffers, gamma, beta, eps, code, dtype, products
        )
    return ops.differentiable_transform(input, weight, bias, scale, gamma, beta, u, stats, eps, code, dtype, products)


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
    if activation not in ops.ACTIVATION_CODES:
        raise ValueError(f"activation: expected None, 'relu', 'gelu' or 'silu', got {activation!r}")
    if input.dim() != 2:
        raise ValueError(f"expected 2D input (got {input.dim()}D input)")
    if not input.is_floating_point():
        raise NotImplementedError(f"input: expected a floating-point tensor, got {input.dtype}")
    if eps < 0.0 or (of_batch and eps == 0.0):
        raise ValueError(f"batch_norm eps must be positive in training and not negative in evaluation, got {eps}")
    rows, features = input.shape
    if weight.dim() != 2 or weight.size(1) != features:
        raise RuntimeError(f"weight: expected shape [N, {features}], got {list(weight.shape)}")
    channels = weight.size(0)
    bias, _, running_mean, running_var, _, _ = vectors
    if (running_mean is None) != (running_var is None):
        raise RuntimeError("running_mean and running_var: expected both or neither")
    expected, device = (channels,), input.device
    for name, vector in zip(_VECTOR_NAMES, vectors, strict=True):
        if vector is not None and vector.shape != expected:
            raise RuntimeError(f"{name}: expected shape [{channels}], got {list(vector.shape)}")
        if vector is not None and vector.device != device:
            raise RuntimeError(f"{name}: expected a tensor on {device} like input, got one on {vector.device}")
    dtype = input.dtype
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None or tensor.dtype == dtype:
            continue
        if autocast_dtype(tensor) != autocast_dtype(input):
            raise RuntimeError(f"{name}: expected {dtype} like input, got {tensor.dtype}")
    if of_batch and rows == 1:
        size = torch.Size([1, channels])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which torch.nn.functional.linear takes this argument, torch.autocast considered."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def autocast(tensor: Tensor) -> Tensor:
    return tensor.to(autocast_dtype(tensor))


def output_dtype(x: Tensor, scale: Tensor | None) -> torch.dtype:
    """Of y, with x as linear takes it."""
    return x.dtype if scale is None or scale.dtype == x.dtype else torch.promote_types(x.dtype, scale.dtype)


def fp32_products(input: Tensor, ieee_fp32: bool) -> int:
    """The code of how products of input are made. Of no effect, and always the same, where input is not float32."""
    if input.dtype != torch.float32:
        return ops.FP32_PRODUCTS["ieee"]
    if tf32_is_allowed():
        return ops.FP32_PRODUCTS["tf32"]
    return ops.FP32_PRODUCTS["ieee" if ieee_fp32 else "split"]


@torch.compiler.assume_constant_result
def tf32_is_allowed() -> bool:
    """PyTorch's own switch for float32 matrix products on CUDA. Compiled code is guarded on it by dynamo."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
