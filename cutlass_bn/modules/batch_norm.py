"""BatchNorm1d, BatchNorm2d and BatchNorm3d, drop-ins for torch's, with what follows them fused."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from .._activations import ACTIVATIONS, check_activation
from ..functional._batch_norm import batch_norm_with_counter
from ._fusible import NORMS
from ._group import group_of, refuse_subclass
from ._leaf import Leaf
from ._subclass import PLAIN, why_not_plain


def _with_activation(cls: type) -> inspect.Signature:
    """The signature of a class of torch's, whichever keywords this release has, and ours."""
    theirs = inspect.signature(cls.__init__)  # type: ignore[misc]
    keyword = inspect.Parameter("activation", inspect.Parameter.KEYWORD_ONLY, default=None)
    return theirs.replace(parameters=[*theirs.parameters.values(), keyword])


class ActivatedBatchNorm:
    """A mixin, to stand before torch's class: all that our modules do otherwise than that one."""

    activation: str | None = None  # also of modules that were pickled before there was one
    is_synchronised = False  # over process_group, in training

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        check_activation(activation)
        super().__init__(*args, **kwargs)
        if activation is not None:
            self.activation = activation

    __init__.__signature__ = _with_activation(nn.BatchNorm2d)  # type: ignore[attr-defined]

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return normalise(self, input, residual, self.activation)

    def is_bare(self) -> bool:
        """Whether nothing follows the normalisation, so that something else may be fused to it."""
        return self.activation is None

    def reason_for_torchs(self, input: Tensor, residual: Tensor | None = None) -> str | None:
        """Why torch's own forward runs, or None where our function does."""
        named = {"the input": input, "the residual": residual}
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        for name, tensor in (*named.items(), *((name, getattr(self, name)) for name in names)):
            if type(tensor) not in PLAIN and (subclass := why_not_plain(tensor)):
                return f"{name} is {subclass}"
        return None

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        return text if self.activation is None else f"{text}, activation={self.activation!r}"


def normalise(norm: Any, input: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    """activation(norm(input) + residual) with the present state of `norm`, one of our modules."""
    norm._check_input_dim(input)
    parameters, buffers = norm._parameters, norm._buffers
    try:  # past nn.Module.__getattr__, which takes longer than all the rest
        weight, bias = parameters["weight"], parameters["bias"]
        running_mean, running_var = buffers["running_mean"], buffers["running_var"]
        counter = buffers["num_batches_tracked"]
    except KeyError:  # plain attributes, as in DataParallel's replicas and parametrised modules
        weight, bias = norm.weight, norm.bias
        running_mean, running_var = norm.running_mean, norm.running_var
        counter = norm.num_batches_tracked
    process_group = group_of(norm) if norm.is_synchronised and norm.training else None
    for tensor in (input, residual, weight, bias, running_mean, running_var, counter):
        if type(tensor) not in PLAIN and (subclass := why_not_plain(tensor)):
            refuse_subclass(process_group, subclass)
            y = nn.modules.batchnorm._BatchNorm.forward(norm, input)
            return ACTIVATIONS[activation].forward(y if residual is None else y + residual)
    # Which statistics are used and which are updated: as in _BatchNorm.forward.
    momentum = norm.momentum
    batch_statistics = norm.training
    if not batch_statistics:
        counter = None
        batch_statistics = running_mean is None and running_var is None
    elif not norm.track_running_stats:
        counter = running_mean = running_var = None
    if momentum is None and counter is None:
        momentum = 0.0
    return batch_norm_with_counter(
        input,
        running_mean,
        running_var,
        weight,
        bias,
        batch_statistics,
        momentum,
        norm.eps,
        counter,
        process_group,
        activation,
        residual,
    )


class BatchNorm1d(ActivatedBatchNorm, nn.BatchNorm1d, Leaf):
    """`torch.nn.BatchNorm1d` and what follows it, y = activation(BatchNorm(input) + residual), on
    kernels of our own. `BatchNorm2d` says more.

    Shape:
        input and residual [N, C] or [N, C, L]; output the same.
    """


class BatchNorm2d(ActivatedBatchNorm, nn.BatchNorm2d, Leaf):
    """`torch.nn.BatchNorm2d` and what follows it, y = activation(BatchNorm(input) + residual), on
    kernels of our own: torch's constructor, parameters, buffers, state dict and errors.

    Args:
        activation: None, "relu", "leaky_relu" (slope 0.01), "gelu" (the erf form) or "silu". An
            attribute that may be changed.
        others: as torch.nn.BatchNorm2d, those of later releases included.

    Shape:
        input [N, C, H, W], float32, float16 or bfloat16 (float64 runs as plain PyTorch); output the
        same, in the same memory format. residual, which may be left out: of input's shape, in any
        layout, and of its dtype (autocast casts it). Parameters and running statistics are float32,
        or follow `.half()` and `.bfloat16()`.

    Raises:
        ValueError: an unknown activation; else as torch.nn.BatchNorm2d.
        RuntimeError: a residual of another shape, device or dtype; else as torch.nn.BatchNorm2d.

    Where the input, a parameter or a buffer is a tensor subclass that stands for other tensors
    (DTensor), torch's own forward runs. `cutlass_bn.explain(module, input)` says so.
    torch's `convert_sync_batchnorm` knows nothing of an activation here, and drops it;
    `cutlass_bn.convert_sync_batchnorm` keeps it.
    """


class BatchNorm3d(ActivatedBatchNorm, nn.BatchNorm3d, Leaf):
    """`torch.nn.BatchNorm3d` and what follows it, y = activation(BatchNorm(input) + residual), on
    kernels of our own. `BatchNorm2d` says more.

    Shape:
        input and residual [N, C, D, H, W]; output the same.
    """


NORMS.update((BatchNorm1d, BatchNorm2d, BatchNorm3d))
