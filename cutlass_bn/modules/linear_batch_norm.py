from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .. import functional
from .._activations import ACTIVATIONS, check_activation
from ._group import check_group, group_of
from ._leaf import Leaf
from ._subclass import PLAIN, why_not_plain
from .sync_batch_norm import SYNCHRONISED, SyncBatchNorm

_PARAMETERS = frozenset(("weight", "bias"))
_BUFFERS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
# Of each child: which classes it may have, by their forwards before anyone patches them.
_FORWARDS: dict[str, dict[Any, Any]] = {
    "gemm": {nn.Linear: nn.Linear.forward},
    "bn": {norm: norm.forward for norm in (nn.BatchNorm1d, *SYNCHRONISED)},
}


class LinearBatchNorm1d(nn.Module, Leaf):
    """activation(BatchNorm1d(scale * Linear(x))): [M, in_features] -> [M, out_features], fused on
    Hopper GPUs.

    Same results, state and errors as the separate modules. Its state is in `gemm` (nn.Linear),
    `scale` (a parameter [out_features], or None) and `bn` (nn.BatchNorm1d; with a process_group
    SyncBatchNorm; torch.nn.SyncBatchNorm, as torch's conversion leaves it, is fused as well).
    Random numbers are drawn for Linear's weight, its bias, then scale. Children that were replaced,
    hooked, parametrised or patched are called as they are, unfused; so they are for a 3-D input, of
    which BatchNorm1d normalises dim 1. `cutlass_bn.explain(module, x)` says what runs.

    Args:
        in_features, out_features, bias: as nn.Linear.
        scale: multiply Linear's output by a parameter, initialised with torch.randn(out_features).
        activation: None, "relu", "leaky_relu" (slope 0.01), "gelu" (the erf form) or "silu".
        eps, momentum, affine, track_running_stats: as nn.BatchNorm1d.
        device, dtype: of the parameters.
        ieee_fp32: as in functional.linear_batch_norm, kept in the attribute of that name: float32
            products by cuBLAS SGEMM instead of an emulation of fp32 by three fp16 products on the
            tensor cores.
        process_group: None, or whose statistics are taken together in training, as in
            functional.linear_batch_norm.

    Raises:
        TypeError: process_group is no group.
        ValueError: an unknown activation; in the forward, as nn.BatchNorm1d (which counts a batch
            of one row before it refuses it, while here nothing changes).
        RuntimeError: in the forward, an input whose features, channels, dtype or device don't fit.
            Nothing has changed then.
    """

    ieee_fp32 = False  # of modules that were pickled before there was a choice

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scale: bool = False,
        activation: str | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ieee_fp32: bool = False,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        self.gemm = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        values = torch.randn(out_features, device=device, dtype=dtype) if scale else None
        self.register_parameter("scale", None if values is None else nn.Parameter(values))
        check_group(process_group)
        options = (out_features, eps, momentum, affine, track_running_stats)
        self.bn: nn.BatchNorm1d | SyncBatchNorm
        if process_group is None:
            self.bn = nn.BatchNorm1d(*options, device=device, dtype=dtype)
        else:
            self.bn = SyncBatchNorm(*options, process_group, device=device, dtype=dtype)
        self.activation = activation
        self.ieee_fp32 = ieee_fp32

    def reset_parameters(self) -> None:
        """Everything as constructed, random numbers drawn in the same order."""
        _reset(self.gemm)
        if isinstance(self.scale, Tensor):
            nn.init.normal_(self.scale)
        _reset(self.bn)

    @property
    def process_group(self) -> Any:
        """Whose statistics are taken together: that of `bn`, None where it is local."""
        bn: Any = self._modules["bn"]
        return group_of(bn) if isinstance(bn, SYNCHRONISED) else None

    def forward(self, input: Tensor) -> Tensor:
        if self.reason_not_fused(input) is not None:
            self._check_sizes(input)
            z = self.gemm(input)
            z = z if self.scale is None else z * self.scale
            return ACTIVATIONS[self.activation].forward(self.bn(z))
        arguments = self.arguments()
        if input.size(1) != arguments["weight"].size(-1):
            _refuse_features(input, arguments["weight"])
        return functional.linear_batch_norm(input, **arguments)

    def arguments(self) -> dict[str, Any]:
        """The arguments of functional.linear_batch_norm that the children's present state amounts
        to.

        For what `reason_not_fused` accepts: its state is all in the dicts of nn.Module, whose
        __getattr__ takes longer than the rest of this.
        """
        children: dict[str, Any] = self._modules
        gemm, bn = children["gemm"], children["bn"]
        linear, affine, buffers = gemm._parameters, bn._parameters, bn._buffers
        training, tracked = bn.training, bn.track_running_stats
        running = tracked or not training
        return {
            "weight": linear["weight"],
            "bias": linear["bias"],
            "scale": self._parameters["scale"],
            "running_mean": buffers["running_mean"] if running else None,
            "running_var": buffers["running_var"] if running else None,
            "gamma": affine["weight"],
            "beta": affine["bias"],
            "training": training,
            "momentum": bn.momentum,
            "eps": bn.eps,
            "activation": self.activation,
            "num_batches_tracked": buffers["num_batches_tracked"] if training and tracked else None,
            "ieee_fp32": self.ieee_fp32,
            "process_group": group_of(bn) if training and type(bn) in SYNCHRONISED else None,
        }

    def reason_not_fused(self, input: Tensor) -> str | None:
        """Why the children are called one by one, or None where the fused function may stand for
        them."""
        reason = self._reason_of_state()
        if reason is not None:
            return reason
        if type(input) is not Tensor and (subclass := why_not_plain(input)):
            return f"the input is {subclass}"
        if input.dim() != 2:
            return f"the input has {input.dim()} dimensions"
        return None

    def _reason_of_state(self) -> str | None:
        children: dict[str, Any] = self._modules
        gemm, bn = children["gemm"], children["bn"]
        for name, child in (("gemm", gemm), ("bn", bn)):
            plain, forwards = type(child), _FORWARDS[name]
            if plain not in forwards:
                return f"{name} is a {plain.__name__}"
            if plain.forward is not forwards[plain]:
                return f"torch.nn.{plain.__name__}.forward is patched"
            if (
                child._forward_hooks
                or child._forward_pre_hooks
                or child._backward_hooks
                or child._backward_pre_hooks
            ):
                return f"{name} has hooks"
            if "forward" in child.__dict__:
                return f"{name}.forward is patched"
            if child._parameters.keys() != _PARAMETERS:
                missing = "weight" if "weight" not in child._parameters else "bias"
                return _why_no_parameter(child, missing, f"{missing} of {name}")
            for tensors in (child._parameters, child._buffers):
                for tensor in tensors.values():
                    if type(tensor) not in PLAIN and (subclass := why_not_plain(tensor)):
                        return f"a parameter or buffer of {name} is {subclass}"
        if type(bn) is SyncBatchNorm and not bn.is_bare():
            return "bn has an activation"
        if "scale" not in self._parameters:
            return _why_no_parameter(self, "scale", "scale")
        scale = self._parameters["scale"]
        if type(scale) not in PLAIN and (subclass := why_not_plain(scale)):
            return f"scale is {subclass}"
        if not bn._buffers.keys() >= _BUFFERS:
            return "the statistics of bn are not its buffers"
        if _has_any_global_hook():
            return "there are global module hooks"
        return None

    def _check_sizes(self, input: Tensor) -> None:
        """Refuses an input by its name, before BatchNorm1d has counted the batch.

        Only where the children are unchanged: what else they might take, who can say.
        """
        if input.dim() not in (1, 3) or self._reason_of_state() is not None:
            return
        arguments = self.arguments()
        if input.size(-1) != arguments["weight"].size(-1):
            _refuse_features(input, arguments["weight"])
        for vector in (arguments["running_mean"], arguments["gamma"]):
            if input.dim() == 3 and vector is not None and vector.size(0) != input.size(1):
                channels, shape = vector.size(0), list(input.shape)
                raise RuntimeError(
                    f"input: expected shape [M, {channels}, {shape[2]}], got {shape}: of three "
                    f"dimensions dim 1 is normalised, which is {channels} channels"
                )

    def extra_repr(self) -> str:
        ieee_fp32 = ", ieee_fp32=True" if self.ieee_fp32 else ""
        return f"scale={self.scale is not None}, activation={self.activation!r}{ieee_fp32}"


def _reset(child: nn.Module) -> None:
    reset = getattr(child, "reset_parameters", None)
    if reset is not None:  # what has replaced a child may have none
        reset()


def _refuse_features(input: Tensor, weight: Tensor) -> NoReturn:
    features, shape = weight.size(-1), list(input.shape)
    expected = [*shape[:-1], features]
    raise RuntimeError(f"input: expected shape {expected}, {features} features, got {shape}")


def _why_no_parameter(module: nn.Module, name: str, text: str) -> str:
    if isinstance(module.__dict__.get(name), Tensor):
        return f"{text} is no parameter but an attribute (as in DataParallel's replicas and FSDP1)"
    return f"{text} is not a parameter"
