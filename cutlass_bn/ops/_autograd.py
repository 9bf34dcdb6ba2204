"""What the gradients of all ops have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch

# What torch.library itself puts around the kernels of an op that needs no gradient. Calling the op
# inside it skips the op's autograd wrapper, which is Python and costs more than the rest of the
# call.
below_autograd = torch._C._AutoDispatchBelowAutograd

Op = Callable[..., Any]
Save = Callable[[Any, tuple[Any, ...], Any], None]


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """In which formulas compute and sum."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dtype_if(needed: bool, vector: Tensor | None) -> torch.dtype | None:
    """In which the ops shall give the gradient of vector; None: not at all."""
    return vector.dtype if needed and vector is not None else None


def takes_formula(grad: Tensor) -> bool:
    """Whether a gradient has to be made of PyTorch's operations.

    Where a graph of it is asked for (create_graph), or where grad is a batch of gradients
    (is_grads_batched) on the CPU, whose kernels are no ops with a vmap formula.
    """
    is_batch = functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)
    return torch.is_grad_enabled() or (is_batch and grad.is_cpu)


def gradients_by_formula(
    formula: Callable[..., Tensor],
    tensors: Iterable[Tensor | None],
    asked: Iterable[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """Of formula(*tensors), for its gradient grad; differentiable.

    The tensors go in under other names: one may have been made of another (a residual is often what
    the input came from), and autograd would follow that way, too.
    """
    with torch.enable_grad():
        apart = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        y = formula(*apart)
        needs = list(asked)
        wanted = [t for t, need in zip(apart, needs, strict=True) if need and t is not None]
        options = {"create_graph": True, "materialize_grads": True}
        found = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype), **options))
    return [next(found) if need else None for need in needs]


def over_a_batch(op: Op) -> Op:
    """The vmap formula of an op in a backward: one call for each of the batched gradients."""

    def formula(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        pairs = list(zip(args, in_dims, strict=True))
        calls = [
            op(*(arg if dim is None else arg.select(dim, i) for arg, dim in pairs))
            for i in range(info.batch_size)
        ]
        if isinstance(calls[0], Tensor):
            return torch.stack(calls), 0
        return tuple(torch.stack(results) for results in zip(*calls, strict=True)), (0,) * len(
            calls[0]
        )

    return formula


def differentiable(name: str, op: Op, save: Save, backward: Op, *, first: bool = False) -> Op:
    """op with its gradient: what register_autograd makes of the same functions, at less cost.

    Only the first of several outputs has one; with `first`, it alone is returned. In autograd's
    graph it shows as `name` and "Backward".
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        with below_autograd():
            outputs = op(*inputs)
            save(ctx, inputs, outputs)
        if first:
            return outputs[0]
        if isinstance(outputs, tuple):
            ctx.mark_non_differentiable(*outputs[1:])
            ctx.set_materialize_grads(False)  # or zeros would be written for the others
        return outputs

    def backward_of(ctx: Any, grad: Tensor | None, *_: Any) -> Any:
        if grad is None:  # what takes the output has no gradient for it
            return (None,) * len(ctx.needs_input_grad)
        return backward(ctx, grad)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_of)}
    function: Any = type(name, (torch.autograd.Function,), methods)
    # Not Function.apply, which looks for torch.func's transforms: those don't come here.
    return super(torch.autograd.Function, function).apply


class Pass(NamedTuple):
    """A forward of one device: as an op without a gradient, and with it."""

    op: Op
    differentiable: Op

    def __call__(self, arguments: tuple[Any, ...], traced: bool, wants_grad: bool) -> Tensor:
        """y. traced: a graph is being made, in which the op stands for itself."""
        if wants_grad and not traced:
            y: Tensor = self.differentiable(*arguments)
            return y
        if traced:
            outputs = self.op(*arguments)
        else:
            with below_autograd():
                outputs = self.op(*arguments)
        return outputs if isinstance(outputs, Tensor) else outputs[0]


class Kernels(NamedTuple):
    """One device's implementation of a layer, for eager calls and, of CUDA, in graphs."""

    training: Pass
    inference: Pass


def take_any_layout(*ops: Any) -> None:
    """Inductor then makes no copies into the strides that tensors have in eager mode."""
    for op in ops:  # not in the schemas: the stable ABI of torch 2.11 has no tags
        op.tags.append(torch.Tag.flexible_layout)


def on_autograd_key(name: str, op: Op, with_gradient: Op) -> None:
    """Not register_autograd, which takes no op that updates its arguments."""

    def dispatch(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(input, Tensor) and input.requires_grad for input in inputs
        ):
            return with_gradient(*inputs)
        with below_autograd():
            return op(*inputs)

    torch.library.impl(f"cutlass_bn::{name}", "Autograd")(dispatch)
