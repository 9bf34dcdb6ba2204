from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import functional, reference

_PARAMETERS = frozenset(("weight", "bias"))
_BUFFERS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
_PLAIN = (Tensor, nn.Parameter, type(None))
_LINEAR_FORWARD, _BATCH_NORM_FORWARD = nn.Linear.forward, nn.BatchNorm1d.forward


class LinearBatchNorm1d(nn.Module):
    """activation(BatchNorm1d(scale * Linear(x))): [M, in_features] -> [M, out_features], fused on Hopper GPUs.

    Same results, state and errors as the separate modules. Its state is in `gemm` (nn.Linear), `scale` (a parameter
    [out_features], or None) and `bn` (nn.BatchNorm1d); random numbers are drawn for Linear's weight, its bias, then
    scale. Children that were replaced, hooked, parametrised or patched are called as they are, unfused; so they are for
    a 3-D input, of which BatchNorm1d normalises dim 1. `cutlass_bn.explain(module, x)` says what runs.

    Args:
        in_features, out_features, bias: as nn.Linear.
        scale: multiply Linear's output by a parameter, initialised with torch.randn(out_features).
        activation: None, "relu", "gelu" (the erf form) or "silu".
        eps, momentum, affine, track_running_stats: as nn.BatchNorm1d.
        device, dtype: of the parameters.
        ieee_fp32: as in functional.linear_batch_norm, kept in the attribute of that name: float32 products by cuBLAS
            SGEMM instead of an emulation of fp32 by three fp16 products on the tensor cores.

    Raises:
        ValueError: an unknown activation; in the forward, as nn.BatchNorm1d (which counts a batch of one row before it
            refuses it, while here nothing changes).
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
    ) -> None:
        super().__init__()
        if activation not in reference.ACTIVATIONS:
            raise ValueError(f"activation: expected None, 'relu', 'gelu' or 'silu', got {activation!r}")
        self.gemm = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        values = torch.randn(out_features, device=device, dtype=dtype) if scale else None
        self.register_parameter("scale", None if values is None else nn.Parameter(values))
        self.bn = nn.BatchNorm1d(out_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.activation = activation
        self.ieee_fp32 = ieee_fp32

    def forward(self, x: Tensor) -> Tensor:
        if self.reason_not_fused(x) is not None:
            z = self.gemm(x)
            z = z if self.scale is None else z * self.scale
            return reference.ACTIVATIONS[self.activation](self.bn(z))
        return functional.linear_batch_norm(x, **self.arguments())

    def arguments(self) -> dict[str, Any]:
        """The arguments of functional.linear_batch_norm that the children's present state amounts to.

        For what `reason_not_fused` accepts: its state is all in the dicts of nn.Module, whose __getattr__ takes longer
        than the rest of this.
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
        }

    def reason_not_fused(self, x: Tensor) -> str | None:
        """Why the children are called one by one, or None where the fused function may stand for them."""
        children: dict[str, Any] = self._modules
        gemm, bn = children["gemm"], children["bn"]
        for name, child, plain, forward in (
            ("gemm", gemm, nn.Linear, _LINEAR_FORWARD),
            ("bn", bn, nn.BatchNorm1d, _BATCH_NORM_FORWARD),
        ):
            if type(child) is not plain:
                return f"{name} is a {type(child).__name__}"
            if plain.forward is not forward:
                return f"torch.nn.{plain.__name__}.forward is patched"
            if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
                return f"{name} has hooks"
            if "forward" in child.__dict__:
                return f"{name}.forward is patched"
            if child._parameters.keys() != _PARAMETERS:
                return f"the parameters of {name} are not weight and bias"
            for parameter in child._parameters.values():
                if type(parameter) not in _PLAIN and is_traceable_wrapper_subclass(parameter):
                    return f"a parameter of {name} is a tensor subclass"
        if "scale" not in self._parameters:
            return "scale is not a parameter"
        if not bn._buffers.keys() >= _BUFFERS:
            return "the statistics of bn are not its buffers"
        if _has_any_global_hook():
            return "there are global module hooks"
        if type(x) not in _PLAIN and is_traceable_wrapper_subclass(x):
            return "the input is a tensor subclass"
        if x.dim() != 2:
            return f"the input has {x.dim()} dimensions"
        return None

    def extra_repr(self) -> str:
        ieee_fp32 = ", ieee_fp32=True" if self.ieee_fp32 else ""
        return f"scale={self.scale is not None}, activation={self.activation!r}{ieee_fp32}"
