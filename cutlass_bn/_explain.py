"""Which code a call would run, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, overload

from torch import Tensor, nn

from . import _library, functional
from .convert._report import Report, report
from .functional import _policy
from .functional._collectives import resolve
from .functional._local import is_looked_at
from .modules import LinearBatchNorm1d
from .modules._fusible import NORMS
from .modules._group import group_of, synchronised_over
from .ops import _layout
from .ops import batch_norm as batch_norm_ops
from .ops import linear_batch_norm as linear_ops


class Plan(NamedTuple):
    """What `explain` returns.

    path: of a LinearBatchNorm1d "fused" (CUTLASS GEMM with the batch norm in its epilogue),
        "portable" (torch.mm and our kernels around it) or "unfused modules" (its children one by
        one); of a BatchNorm "kernels"; of both "cpu" (PyTorch's kernels, as exact as ours),
        "torch" (what torch.nn would do) or "reference" (the float64 definition).
    tile: the GEMM's CTA tile ("large 128x128 tile"; "split large 128x128 tile" where fp16 products
        emulate fp32) or, of a BatchNorm, the memory format ("NCHW", "channels_last") and, in
        training, which passes read the input from memory once ("on chip forward and backward",
        "on chip forward", "on chip backward"; else they read it twice; not said of an input that is
        copied first).
    reason: why not the fastest path, "" where it is the fastest; "synchronised over N ranks".
    """

    path: str
    tile: str
    reason: str

    def __str__(self) -> str:
        details = ", ".join(part for part in (self.tile, self.reason) if part)
        return f"{self.path}: {details}" if details else self.path


@overload
def explain(target: nn.Module) -> Report: ...  # type: ignore[overload-overlap]


@overload
def explain(target: nn.Module | Callable[..., Tensor], *args: Any, **kwargs: Any) -> Plan: ...


def explain(target: nn.Module | Callable[..., Tensor], *args: Any, **kwargs: Any) -> Plan | Report:
    """The plan of `target(*args, **kwargs)`, which is not run: nothing is read and nothing changes.

    Of a module and no arguments: a report, a dict that gives for the qualified name of each
    BatchNorm, Linear and activation in it how it is fused, or why it is left alone.

    Args:
        target: a LinearBatchNorm1d, a BatchNorm1d, 2d or 3d, a SyncBatchNorm, a BatchNormAct2d,
            functional.linear_batch_norm or functional.batch_norm; for a report, any module.

    Raises:
        TypeError: another target, or arguments that it doesn't take.
        RuntimeError: CUDA tensors without the compiled library, or operands that don't fit.
    """
    if isinstance(target, nn.Module):
        if not args and not kwargs:
            return report(target)
        for cls in type(target).__mro__:
            if cls is LinearBatchNorm1d:
                return _plan_linear_module(target, *args, **kwargs)
            if cls in NORMS:
                return _plan_batch_norm_module(target, *args, **kwargs)
    elif target is functional.linear_batch_norm:
        return _plan_linear(target, *args, **kwargs)
    elif target is functional.batch_norm:
        return _plan_batch_norm(target, *args, **kwargs)
    raise TypeError(f"expected a module or function of cutlass_bn, got {target!r}")


def _plan_linear_module(module: Any, input: Tensor) -> Plan:
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
    if a["training"] and (plan := _plan_of_group(x, a["process_group"])):
        return plan
    dtype = _policy.output_dtype(x, a["scale"])
    reason = _policy.reason_for_reference(x, vectors)
    if reason is not None:
        return Plan(_policy.choose(x, dtype, vectors), "", reason)
    _library.require()
    x, weight = (_policy.autocast(tensor.detach()) for tensor in (x, weight))
    inference = not a["training"] and running_mean is not None
    products = _policy.fp32_products(x, a["ieee_fp32"])
    path, tile, reason = linear_ops.plan(x, weight, dtype, products, inference)
    return Plan(path, f"{tile} tile" if tile else "", reason)


def _plan_of_group(input: Tensor, process_group: Any) -> Plan | None:
    """Where statistics are of more processes than this one."""
    if resolve(process_group) is None:
        return None
    path = "cpu" if is_looked_at(input) else "torch"
    return Plan(path, "", synchronised_over(process_group))


def _plan_batch_norm_module(module: Any, input: Tensor, residual: Tensor | None = None) -> Plan:
    reason = module.reason_for_torchs(input, residual)
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
        process_group=group_of(module) if module.is_synchronised and module.training else None,
    )


def _plan_batch_norm(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Plan:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    input = a["input"]
    if a["training"] and (plan := _plan_of_group(input, a["process_group"])):
        return plan
    vectors = (a["running_mean"], a["running_var"], a["weight"], a["bias"])
    reason = _policy.reason_for_reference(input, vectors)
    if reason is not None:
        return Plan(_policy.choose(input, input.dtype, vectors), "", reason)
    _library.require()
    channels_last = not input.is_contiguous() and _layout.is_channels_last(input)
    layout = "channels_last" if channels_last else "NCHW"
    if not _layout.is_dense(input):
        return Plan("kernels", layout, "the input is copied to dense memory first")
    if a["training"] and not channels_last:
        passes = {"forward": False, "backward": True}
        on_chip = " and ".join(
            name
            for name, backward in passes.items()
            if batch_norm_ops.batch_norm_plan(input, backward)[0]
        )
        layout += f", on chip {on_chip}" if on_chip else ""
    return Plan("kernels", layout, "")
