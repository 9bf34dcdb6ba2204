"""What both layers decide alike: which implementation runs, autocast, memory formats, and which
counters the ops take.

kernels     our CUDA kernels, as registered ops. `torch.compile` and the tracers get the op itself.
cpu         `cutlass_bn.cpu`: eager calls with CPU tensors.
torch       PyTorch's own functions (_aten.py), for graphs that shall run without us or had better
            have plain nodes: the CPU under torch.compile, torch.export, torch.jit.trace, make_fx
            and fake tensors; ONNX; functionalize; other devices; tensor subclasses.
reference   `cutlass_bn.reference`: float64 on CUDA, the other transforms of torch.func,
forward-mode differentiation.
"""

from __future__ import annotations

from typing import Literal, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import reference
from ..ops.product import FP32_PRODUCTS
from ..reference import autocast_dtype

Path = Literal["kernels", "cpu", "torch", "reference"]
Vectors = tuple[Optional[Tensor], ...]  # noqa: UP045 (evaluated, by Python 3.10 too)
TRANSFORMED = "torch.func or forward-mode differentiation is active"
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KERNEL_DTYPES = frozenset(KERNEL_DTYPES)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_MODE_KEYS = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PreDispatch)


def choose(input: Tensor, dtype: torch.dtype, vectors: Vectors) -> Path:
    """What runs. dtype: of the value that is normalised, input's or the linear layer's product.
    vectors: running_mean, running_var and the parameters."""
    if input.is_cuda and reason_for_reference(input, vectors) is None:
        return "kernels"
    if is_transformed():
        graph = not is_traced() and _is_functionalized()
    else:
        graph = is_traced() or not _is_plain(input)
        if not graph and input.is_cpu and _cpu_takes(input.dtype, vectors):
            return "cpu"
    return "torch" if graph and _torch_takes(dtype, vectors) else "reference"


def reason_for_reference(input: Tensor, vectors: Vectors) -> str | None:
    """Why the CUDA kernels don't take the call, or None where they do."""
    if not input.is_cuda:
        return f"the input is on {input.device.type}"
    if input.dtype not in _KERNEL_DTYPES:
        return f"the input is {str(input.dtype).removeprefix('torch.')}"
    for vector in vectors:
        if vector is None:
            continue
        if vector.dtype not in _KERNEL_DTYPES:
            return "a parameter or running statistic is not float32, float16 or bfloat16"
        if not vector.is_cuda:  # before a meta tensor makes the call one of meta tensors
            return "a parameter or running statistic is not on the GPU"
    mean, var = vectors[:2]
    if mean is not None and var is not None and not (mean.is_contiguous() and var.is_contiguous()):
        return "the running statistics are not contiguous"
    if type(input) not in _PLAIN_TYPES and is_traceable_wrapper_subclass(input):
        return "the input is a tensor subclass"
    if is_transformed():
        return TRANSFORMED
    return "an ONNX graph is being made" if is_traced() and _is_for_onnx() else None


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work: for those the ops have no
    rules."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_traced() -> bool:
    """Whether a graph is being made in which an op stands for itself: an autograd.Function
    can't."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


@torch.compiler.assume_constant_result  # dynamo itself takes torch.onnx's answer for False
def _is_for_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def _is_functionalized() -> bool:
    """Whether torch.func.functionalize is among the active transforms."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Functionalize for level in stack)


def _is_plain(input: Tensor) -> bool:
    """Whether input has values that may be looked at, and nothing watches which operations are done
    to it.

    Otherwise it is a fake, meta or wrapped tensor, or a TorchDispatchMode (make_fx,
    FlopCounterMode) is active.
    """
    if type(input) not in _PLAIN_TYPES or not (input.is_cpu or input.is_cuda):
        return False
    return not any(map(torch._C._dispatch_tls_is_dispatch_key_included, _MODE_KEYS))


def _torch_takes(dtype: torch.dtype, vectors: Vectors) -> bool:
    """Whether torch's batch norm takes vectors of these dtypes: all of dtype, or float32 beside a
    half."""
    dtypes = [vector.dtype for vector in vectors if vector is not None]
    in_float32 = dtype in reference.HALVES and all(other == torch.float32 for other in dtypes)
    return in_float32 or all(other == dtype for other in dtypes)


def _cpu_takes(dtype: torch.dtype, vectors: Vectors) -> bool:
    """Whether cutlass_bn.cpu keeps the precision of all vectors: beside float64 it computes in
    float64."""
    for vector in vectors:
        if vector is not None and vector.dtype != dtype and vector.dtype not in KERNEL_DTYPES:
            return False
    return True


def plain_counter(
    counter: Tensor | None, momentum: float | None, input: Tensor
) -> tuple[Tensor | None, float | None]:
    """(the counter that the ops take in place of counter, momentum): they take an int64 on input's
    device, or none.

    After the call `settle_counter` brings counter up to date.
    """
    if counter is None:
        return None, momentum
    if counter.get_device() == input.get_device():  # -1 on the CPU
        return counter if counter.dtype == torch.int64 else counter.long(), momentum
    return None, 1.0 / (float(counter) + 1.0) if momentum is None else momentum


def settle_counter(counter: Tensor | None, plain: Tensor | None) -> None:
    if counter is None or counter is plain:
        return
    if plain is None:
        counter.add_(1)
    else:
        counter.copy_(plain)


def contiguous(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def wants_grad(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def autocast(tensor: Tensor) -> Tensor:
    return tensor.to(autocast_dtype(tensor))


def output_dtype(x: Tensor, scale: Tensor | None) -> torch.dtype:
    """Of y: that of linear's output, torch.autocast considered, promoted with scale's."""
    dtype = autocast_dtype(x)
    return (
        dtype if scale is None or scale.dtype == dtype else torch.promote_types(dtype, scale.dtype)
    )


def fp32_products(input: Tensor, ieee_fp32: bool) -> int:
    """The code of how products of input are made. Of no effect, and always the same, where input is
    not float32."""
    if input.dtype != torch.float32:
        return FP32_PRODUCTS["ieee"]
    if tf32_is_allowed():
        return FP32_PRODUCTS["tf32"]
    return FP32_PRODUCTS["ieee" if ieee_fp32 else "split"]


@torch.compiler.assume_constant_result
def tf32_is_allowed() -> bool:
    """PyTorch's own switch for float32 matrix products on CUDA. Compiled code is guarded on it by
    dynamo."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"
