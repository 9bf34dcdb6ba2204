"""Which code a call would run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from . import _library, functional
from .functional import _policy
from .modules import BatchNorm2d, LinearBatchNorm1d
from .ops import batch_norm as batch_norm_ops
from .ops import linear_batch_norm as linear_ops


class Plan(NamedTuple):
    """What `explain` returns.

    path: of a LinearBatchNorm1d "fused" (CUTLASS GEMM with the batch norm in its epilogue),
        "portable" (torch.mm and our kernels around it) or "unfused modules" (its children one by
        one); of a BatchNorm2d "kernels"; of both "cpu" (PyTorch's kernels, as exact as ours),
        "torch" (what torch.nn would do) or "reference" (the float64 definition).
    tile: the GEMM's CTA tile ("large 128x128 tile"; "split large 128x128 tile" where fp16 products emulate fp32) or, of
        a BatchNorm2d, the memory format ("NCHW", "channels_last") and, in training, which passes read the input from
        memory once ("on chip forward and backward", "on chip forward", "on chip backward"; else they read it twice; not
        said of an input that is copied first).
    reason: why not the fastest path, "" where it is the fastest.
    """

    path: str
    tile: str
    reason: str

    def __str__(self) -> str:
        details = ", ".join(part for part in (self.tile, self.reason) if part)
        return f"{self.path}: {details}" if details else self.path


def explain(target: nn.Module | Callable[..., Tensor], *args: Any, **kwargs: Any) -> Plan:
    """The plan of `target(*args, **kwargs)`, which is not run: no data is read and no state changes.

    Args:
        target: a LinearBatchNorm1d, a BatchNorm2d, functional.linear_batch_norm or functional.batch_norm.

    Raises:
        TypeError: another target, or arguments that it doesn't take.
        RuntimeError: CUDA tensors without the compiled library, or operands that don't fit together.
    """
    for kind, plan in _PLANS:
        if target is kind or (isinstance(kind, type) and isinstance(target, kind)):
            return plan(target, *args, **kwargs)
    raise TypeError(f"expected a module or function of cutlass_bn, got {target!r}")


def _plan_linear_module(module: LinearBatchNorm1d, input: Tensor) -> Plan:
    reason = module.reason_not_fused(input)
    if reason is not None:
        return Plan("unfused modules", "", reason)
    return _plan_linear(functional.linear_batch_norm, input, **module.arguments())


def _plan_linear(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Plan:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    x, weight, running_mean = a["input"], a["weight"], a["running_mean"]
    vectors = (running_mean, a["running_var"], a["bias"], a["scale"], a["gamma"], a["beta"])
    dtype = _policy.output_dtype(x, a["scale"])
    reason = _policy.reason_for_reference(x, *vectors)
    if reason is not None:
        return Plan(_policy.choose(x, dtype, *vectors), "", reason)
    _library.require()
    x, weight = (_policy.autocast(tensor.detach()) for tensor in (x, weight))
    inference = not a["training"] and running_mean is not None
    products = _policy.fp32_products(x, a["ieee_fp32"])
    path, tile, reason = linear_ops.plan(x, weight, dtype, products, inference)
    return Plan(path, f"{tile} tile" if tile else "", reason)


def _plan_batch_norm_module(module: BatchNorm2d, input: Tensor) -> Plan:
    reason = module.reason_for_torchs(input)
    if reason is not None:
        return Plan("torch", "", reason)
    statistics = (module.running_mean, module.running_var)
    return _plan_batch_norm(
        functional.batch_norm,
        input,
        *statistics,
        module.weight,
        module.bias,
        module.training or module.running_mean is None,
    )


def _plan_batch_norm(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Plan:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    input = a["input"]
    vectors = (a["running_mean"], a["running_var"], a["weight"], a["bias"])
    reason = _policy.reason_for_reference(input, *vectors)
    if reason is not None:
        return Plan(_policy.choose(input, input.dtype, *vectors), "", reason)
    _library.require()
    channels_last = not input.is_contiguous() and _policy.is_channels_last(input)
    layout = "channels_last" if channels_last else "NCHW"
    if not _policy.is_dense(input):
        return Plan("kernels", layout, "the input is copied to dense memory first")
    if a["training"] and not channels_last:
        passes = {"forward": False, "backward": True}
        on_chip = " and ".join(
            name for name, backward in passes.items() if batch_norm_ops.batch_norm_plan(input, backward)[0]
        )
        layout += f", on chip {on_chip}" if on_chip else ""
    return Plan("kernels", layout, "")


_PLANS: tuple[tuple[Any, Callable[..., Plan]], ...] = (
    (LinearBatchNorm1d, _plan_linear_module),
    (functional.linear_batch_norm, _plan_linear),
    (BatchNorm2d, _plan_batch_norm_module),
    (functional.batch_norm, _plan_batch_norm),
)
