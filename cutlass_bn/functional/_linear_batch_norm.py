from __future__ import annotations

import torch
from torch import Tensor

from .. import _library, reference
from ..ops import linear_batch_norm as ops
from ._batch_norm import _below_autograd

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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
) -> Tensor:
    """activation(batch_norm(scale * linear(input, weight, bias))), differentiable (also twice) in all its parameters.

    Args:
        input: [M, K], float32, float16 or bfloat16 (CUDA kernels) or float64.
        weight: [N, K], of input's dtype (autocast casts both, and bias).
        bias: [N], of weight's dtype.
        scale: [N], a factor per feature before the normalisation.
        running_mean, running_var: [N]. Updated in place in training; otherwise what is normalised with.
        gamma, beta: [N], the affine map after the normalisation.
        training: normalise with the batch's own mean and (biased) variance. So it is, too, without running statistics.
        momentum: weight of the batch in the running statistics; None: 1 / num_batches_tracked, a cumulative average.
        eps: added to the variance.
        activation: None, "relu", "gelu" (the erf form) or "silu".
        num_batches_tracked: one int64, incremented in training.

    Returns:
        [M, N], contiguous. Its dtype is that of linear's output promoted with scale's, as in the separate operations.

    Raises:
        ValueError: input is not 2-D, a batch of one row in training, an unknown activation. Nothing has changed then.
        RuntimeError: shapes, dtypes or devices that don't fit, or a CUDA tensor without the compiled library.
    """
    of_batch = training or running_mean is None
    _check(input, weight, bias, scale, running_mean, running_var, gamma, beta, of_batch, activation)
    if momentum is None and num_batches_tracked is None:
        momentum = 0.0  # nothing to average over: as torch.nn.BatchNorm1d, leave the running statistics alone
    if reason_for_reference(input, weight, bias, scale, running_mean, running_var, gamma, beta):
        return reference.linear_batch_norm(
            input, weight, bias, scale, running_mean, running_var, num_batches_tracked, gamma, beta,
            training, momentum, eps, activation,
        )  # fmt: skip

    _library.require()
    x, w, b = autocast(input), autocast(weight), None if bias is None else autocast(bias).contiguous()
    scale, gamma, beta = (None if v is None else v.contiguous() for v in (scale, gamma, beta))
    if not training:
        num_batches_tracked = None

    def run() -> Tensor:
        dtype, code, allow_tf32 = output_dtype(x, scale), ops.ACTIVATION_CODES[activation], tf32_is_allowed()
        if not training and running_mean is not None and running_var is not None:
            return ops.inference(x, w, b, scale, running_mean, running_var, gamma, beta, eps, code, dtype, allow_tf32)
        u, stats = ops.stats(
            x.detach(), w.detach(), _detach(b), _detach(scale), running_mean, running_var, num_batches_tracked,
            momentum, eps, allow_tf32,
        )  # fmt: skip
        return ops.transform(x, w, b, scale, gamma, beta, u, stats, code, dtype)

    differentiable = (x, w, b, scale, gamma, beta)
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable)
    if wants_grad or torch.compiler.is_compiling():
        return run()
    with _below_autograd():
        return run()


def _detach(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _check(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    of_batch: bool,
    activation: str | None,
) -> None:
    if activation not in ops.ACTIVATION_CODES:
        raise ValueError(f"activation: expected None, 'relu', 'gelu' or 'silu', got {activation!r}")
    if input.dim() != 2:
        raise ValueError(f"expected 2D input (got {input.dim()}D input)")
    if weight.dim() != 2 or weight.size(1) != input.size(1):
        raise RuntimeError(f"weight: expected shape [N, {input.size(1)}], got {list(weight.shape)}")
    if (running_mean is None) != (running_var is None):
        raise RuntimeError("running_mean and running_var: expected both or neither")
    channels = weight.size(0)
    vectors = (bias, scale, running_mean, running_var, gamma, beta)
    for name, vector in zip(_VECTOR_NAMES, vectors, strict=True):
        if vector is not None and (vector.dim() != 1 or vector.size(0) != channels):
            raise RuntimeError(f"{name}: expected shape [{channels}], got {list(vector.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and autocast_dtype(tensor) != autocast_dtype(input):
            raise RuntimeError(f"{name}: expected {input.dtype} like input, got {tensor.dtype}")
    if of_batch and input.size(0) == 1:
        size = torch.Size([1, channels])
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")


def reason_for_reference(input: Tensor, weight: Tensor, *vectors: Tensor | None) -> str | None:
    """Why the call runs in plain PyTorch (cutlass_bn.reference), or None where our kernels take it."""
    if not input.is_cuda:
        return f"the input is on {input.device.type}"
    dtype = autocast_dtype(input)
    if dtype not in _KERNEL_DTYPES:
        return f"the input is {str(dtype).removeprefix('torch.')}"
    _, _, running_mean, running_var, _, _ = vectors
    if any(v is not None and v.dtype not in _KERNEL_DTYPES for v in vectors):
        return "a parameter or running statistic is not float32, float16 or bfloat16"
    if any(v is not None and not v.is_contiguous() for v in (running_mean, running_var)):
        return "the running statistics are not contiguous"
    return None


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
    return x.dtype if scale is None else torch.promote_types(x.dtype, scale.dtype)


@torch.compiler.assume_constant_result
def tf32_is_allowed() -> bool:
    """PyTorch's own switch for float32 matrix products on CUDA. Compiled code is guarded on it by dynamo."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
