from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import functional, reference

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class LinearBatchNorm1d(nn.Module):
    """activation(BatchNorm1d(scale * Linear(x))): [M, in_features] -> [M, out_features], fused on CUDA.

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

    Raises:
        ValueError: an unknown activation; in the forward, as nn.BatchNorm1d (which counts a batch of one row before it
            refuses it, while here nothing changes).
    """

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
    ) -> None:
        super().__init__()
        if activation not in reference.ACTIVATIONS:
            raise ValueError(f"activation: expected None, 'relu', 'gelu' or 'silu', got {activation!r}")
        self.gemm = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        values = torch.randn(out_features, device=device, dtype=dtype) if scale else None
        self.register_parameter("scale", None if values is None else nn.Parameter(values))
        self.bn = nn.BatchNorm1d(out_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if self.reason_not_fused(x) is not None:
            z = self.gemm(x)
            z = z if self.scale is None else z * self.scale
            return reference.ACTIVATIONS[self.activation](self.bn(z))
        return functional.linear_batch_norm(x, **self.arguments())

    def arguments(self) -> dict[str, Any]:
        """The arguments of functional.linear_batch_norm that the children's present state amounts to."""
        gemm, bn = self.gemm, self.bn
        running = not bn.training or bn.track_running_stats
        return {
            "weight": gemm.weight,
            "bias": gemm.bias,
            "scale": self.scale,
            "running_mean": bn.running_mean if running else None,
            "running_var": bn.running_var if running else None,
            "gamma": bn.weight,
            "beta": bn.bias,
            "training": bn.training,
            "momentum": bn.momentum,
            "eps": bn.eps,
            "activation": self.activation,
            "num_batches_tracked": bn.num_batches_tracked if bn.training and bn.track_running_stats else None,
        }

    def reason_not_fused(self, x: Tensor) -> str | None:
        """Why the children are called one by one, or None where the fused function may stand for them."""
        for name, child, plain in (("gemm", self.gemm, nn.Linear), ("bn", self.bn, nn.BatchNorm1d)):
            if type(child) is not plain:
                return f"{name} is a {type(child).__name__}"
            if any(getattr(child, hooks) for hooks in _HOOKS):
                return f"{name} has hooks"
            if "forward" in child.__dict__:
                return f"{name}.forward is patched"
            if any(is_traceable_wrapper_subclass(p) for p in child._parameters.values() if p is not None):
                return f"a parameter of {name} is a tensor subclass"
        if _has_any_global_hook():
            return "there are global module hooks"
        if is_traceable_wrapper_subclass(x):
            return "the input is a tensor subclass"
        if x.dim() != 2:
            return f"the input has {x.dim()} dimensions"
        return None

    def extra_repr(self) -> str:
        return f"scale={self.scale is not None}, activation={self.activation!r}"
