"""The batch-norm ops of csrc/ops/batch_norm*.cpp: Python entries, fake implementations, autograd and vmap formulas.

`batch_norm_training` updates running buffers, returns y and `stats`, and is differentiable in input, weight and bias
through y. The gradients are ops themselves, `batch_norm_backward` and `batch_norm_inference_backward`; where a graph of
them is asked for (create_graph) formulas in plain PyTorch take their place.

`cutlass_bn.cpu` has the same functions for CPU tensors. They are no registered ops, and need no library: `CPU` is what
eager calls take of them, with the gradients that the ops have, as `CUDA` is of the ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from .. import cpu, reference
from .._library import library_is_loaded

# What torch.library itself puts around the kernels of an op that needs no gradient. Calling the op inside it skips
# the op's autograd wrapper, which is Python and costs more than the rest of the call.
below_autograd = torch._C._AutoDispatchBelowAutograd
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

if library_is_loaded():
    batch_norm_training = torch.ops.cutlass_bn.batch_norm_training.default
    batch_norm_inference = torch.ops.cutlass_bn.batch_norm_inference.default
    # -> dx, dweight, dbias. What they take is in csrc/ops/library.cpp.
    batch_norm_backward = torch.ops.cutlass_bn.batch_norm_backward.default
    batch_norm_inference_backward = torch.ops.cutlass_bn.batch_norm_inference_backward.default
    batch_norm_plan = torch.ops.cutlass_bn.batch_norm_plan.default


class Kernels(NamedTuple):
    """What eager calls take of one device's implementation. The first two have no gradient, and want none recorded."""

    training: Callable[..., tuple[Tensor, Tensor]]
    inference: Callable[..., Tensor]
    differentiable_training: Callable[..., tuple[Tensor, Tensor]]
    differentiable_inference: Callable[..., Tensor]


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """In which formulas compute and sum."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view([1, -1] + [1] * (like.dim() - 2))


def _reduced_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _fake_training(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), input.new_empty((3, input.size(1)), dtype=torch.float32)


def _fake_inference(
    input: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    return torch.empty_like(input)


def _fake_backward(grad: Tensor, input: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, input_grad, weight_grad, bias_grad = others

    def vector(dtype: torch.dtype | None) -> Tensor:
        return grad.new_empty((0 if dtype is None else grad.size(1),), dtype=dtype or torch.float32)

    if not input_grad:
        dx = grad.new_empty((0,))
    elif input is not None:
        dx = torch.empty_like(input)
    elif grad.is_contiguous() or grad.movedim(1, -1).is_contiguous():
        dx = torch.empty_like(grad)
    else:
        dx = grad.new_empty(grad.shape)
    return dx, vector(weight_grad), vector(bias_grad)


def over_a_batch(op: Callable[..., Any]) -> Callable[..., Any]:
    """The vmap formula of an op in a backward: one call for each of the batched gradients (is_grads_batched)."""

    def formula(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        calls = [
            op(*(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
            for i in range(info.batch_size)
        ]
        if isinstance(calls[0], Tensor):
            return torch.stack(calls), 0
        return tuple(torch.stack(gradients) for gradients in zip(*calls, strict=True)), (0,) * len(calls[0])

    return formula


def takes_formula(grad: Tensor) -> bool:
    """Whether a gradient has to be made of PyTorch's operations: where a graph of it is asked for (create_graph), or
    where grad is a batch of gradients (is_grads_batched) on the CPU, whose kernels are no ops with a vmap formula."""
    is_batch = functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)
    return torch.is_grad_enabled() or (is_batch and grad.is_cpu)


def _save_for_training(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    input, *_, weight, bias, _, _ = inputs
    stats = output[1]
    # The bias alone needs only sum(grad).
    needs_input = ctx.needs_input_grad[0] or ctx.needs_input_grad[4]
    ctx.save_for_backward(*((input, stats, weight) if needs_input else (None, None, None)))
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)  # or zeros would be written for stats


def _training_backward(
    backward: Callable[..., Any], ctx: Any, grad: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    if grad is None:  # what takes y has no gradient for it
        return (None,) * 8
    if takes_formula(grad):
        with torch.enable_grad():
            dx, dweight, dbias = _differentiable_gradients(ctx, grad)
    else:
        dx, dweight, dbias = _gradients(backward, ctx, grad)
    return dx, None, None, None, dweight, dbias, None, None


def _gradients(
    backward: Callable[..., Any], ctx: Any, grad: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    needs_dx, *_, needs_dweight, needs_dbias, _, _ = ctx.needs_input_grad
    input, stats, weight = ctx.saved_tensors
    dx, dweight, dbias = backward(
        grad, input, stats, weight, needs_dx,
        weight.dtype if needs_dweight else None, ctx.bias_dtype if needs_dbias else None,
    )  # fmt: skip
    return dx if needs_dx else None, dweight if needs_dweight else None, dbias if needs_dbias else None


def _differentiable_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    needs_dx, *_, needs_dweight, needs_dbias, _, _ = ctx.needs_input_grad
    input, stats, weight = ctx.saved_tensors
    dbias = grad.to(wide_dtype(grad)).sum(_reduced_dims(grad)).to(ctx.bias_dtype) if needs_dbias else None
    if input is None:
        return None, None, dbias
    eps: Any = 0.0
    if input.numel():
        with torch.no_grad():  # what invstd says beyond the variance
            eps = stats[2].double().pow(-2) - torch.var(input.double(), _reduced_dims(input), correction=0)
    y = reference.batch_norm(input, None, None, None, weight, None, True, 0.0, eps)
    wanted = [tensor for tensor, needed in ((input, needs_dx), (weight, needs_dweight)) if needed]
    grads = list(torch.autograd.grad(y, wanted, grad, create_graph=True))
    dx = grads.pop(0) if needs_dx else None
    dweight = grads.pop(0) if needs_dweight else None
    return dx, dweight, dbias


def _save_for_inference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, running_mean, running_var, weight, bias, eps = inputs
    needs_dx, needs_dweight = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
    # Running buffers may be changed in place before backward: keep values, not the buffers.
    ctx.save_for_backward(
        input if needs_dweight else None,
        running_mean.clone() if needs_dweight else None,
        running_var.clone() if needs_dx or needs_dweight else None,
        weight if needs_dx else None,
    )
    ctx.eps = eps
    ctx.memory_format = torch.contiguous_format if input.is_contiguous() else _CHANNELS_LAST.get(input.dim())
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _in_format(grad: Tensor, memory_format: torch.memory_format | None) -> Tensor:
    """grad, from which dx takes its layout, as dx shall lie. (Contiguous it is, too, where grad is not dense.)"""
    if memory_format is None or (memory_format == torch.contiguous_format and not grad.movedim(1, -1).is_contiguous()):
        return grad
    return grad.contiguous(memory_format=memory_format)


def _inference_backward(backward: Callable[..., Any], ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad = _in_format(grad, ctx.memory_format)
    if takes_formula(grad):
        return _differentiable_inference_backward(ctx, grad)
    needs_dx, _, _, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
    dx, dweight, dbias = backward(
        grad, *ctx.saved_tensors, ctx.eps, needs_dx,
        ctx.weight_dtype if needs_dweight else None, ctx.bias_dtype if needs_dbias else None,
    )  # fmt: skip
    gradients = dx if needs_dx else None, None, None, dweight if needs_dweight else None
    return *gradients, dbias if needs_dbias else None, None


def _differentiable_inference_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy * weight * invstd; the running statistics are constants."""
    needs_dx, _, _, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
    input, mean, var, weight = ctx.saved_tensors
    wide = wide_dtype(grad)
    wide_grad = grad.to(wide)
    dx = dweight = dbias = None
    if needs_dx or needs_dweight:
        invstd = torch.rsqrt(var.to(wide) + ctx.eps)
    if needs_dx:
        gain = invstd if weight is None else invstd * weight
        dx = (wide_grad * _per_channel(gain, grad)).to(grad.dtype)
    if needs_dweight:
        centred = input.to(wide) - _per_channel(mean.to(wide), input)
        dweight = ((centred * wide_grad).sum(_reduced_dims(grad)) * invstd).to(ctx.weight_dtype)
    if needs_dbias:
        dbias = wide_grad.sum(_reduced_dims(grad)).to(ctx.bias_dtype)
    return dx, None, None, dweight, dbias, None


def without_wrapper(name: str, op: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """The op with its gradient for eager use: what register_autograd makes of the same functions, at less cost.

    In autograd's graph it shows as `name` and "Backward".
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        with below_autograd():
            output = op(*inputs)
            save(ctx, inputs, output)
        return output

    function: Any = type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    return function.apply


def _kernels(
    training: Callable[..., tuple[Tensor, Tensor]],
    inference: Callable[..., Tensor],
    backward: Callable[..., Any],
    inference_backward: Callable[..., Any],
) -> Kernels:
    of_training = functools.partial(_training_backward, backward)
    of_inference = functools.partial(_inference_backward, inference_backward)
    return Kernels(
        training,
        inference,
        without_wrapper("BatchNorm", training, _save_for_training, of_training),
        without_wrapper("BatchNorm", inference, _save_for_inference, of_inference),
    )


CPU = _kernels(
    cpu.batch_norm_training,
    cpu.batch_norm_inference,
    cpu.batch_norm_backward,
    cpu.batch_norm_inference_backward,
)


def _training_with_autograd(*inputs: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(isinstance(input, Tensor) and input.requires_grad for input in inputs):
        return differentiable_training(*inputs)
    with below_autograd():
        return batch_norm_training(*inputs)


def _register() -> None:
    fakes: dict[str, Callable[..., Any]] = {
        "training": _fake_training,
        "inference": _fake_inference,
        "backward": _fake_backward,
        "inference_backward": _fake_backward,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"cutlass_bn::batch_norm_{name}", fake)
    # Not register_autograd, which takes no op that updates its arguments.
    torch.library.impl("cutlass_bn::batch_norm_training", "Autograd")(_training_with_autograd)
    torch.library.register_autograd(
        "cutlass_bn::batch_norm_inference",
        functools.partial(_inference_backward, batch_norm_inference_backward),
        setup_context=_save_for_inference,
    )
    for name, op in (("backward", batch_norm_backward), ("inference_backward", batch_norm_inference_backward)):
        torch.library.register_vmap(f"cutlass_bn::batch_norm_{name}", over_a_batch(op))


if library_is_loaded():
    CUDA = _kernels(batch_norm_training, batch_norm_inference, batch_norm_backward, batch_norm_inference_backward)
    differentiable_training, differentiable_inference = CUDA.differentiable_training, CUDA.differentiable_inference
    _register()
