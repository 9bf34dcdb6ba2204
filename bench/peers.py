"""The variants of a case. All of them share the eager model's parameters and start from its running statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import cutlass_bn

from .cases import BN2D, GEMM_SCALE_BN, Case
from .records import COMPILE, COPY, EAGER, GEMM, IEEE, MAX_AUTOTUNE, OURS, OURS_COMPILED, UNFUSED
from .timing import Timing


class GemmScaleBatchNorm(nn.Module):
    """BatchNorm1d(scale * Linear(x)) in plain PyTorch."""

    def __init__(self, in_features: int, out_features: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, device=device)
        self.scale = nn.Parameter(torch.randn(out_features, device=device))
        self.bn = nn.BatchNorm1d(out_features, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x) * self.scale)


@dataclass(frozen=True)
class Variant:
    """A way to compute a case."""

    run: Callable[[Tensor], Tensor]
    model: nn.Module | None = None  # whose parameters and running statistics it uses
    checked: bool = True  # whether run(x) is the case's y

    @property
    def bn(self) -> nn.Module | None:
        """Whose running statistics it updates."""
        return None if self.model is None else _batch_norm(self.model)


def eager_model(case: Case, device: torch.device) -> nn.Module:
    """The case's model with random parameters and running statistics. BatchNorm stays in float32 in half precision."""
    bn: nn.Module
    if case.kind == BN2D:
        model = bn = nn.BatchNorm2d(case.shape[1], device=device)
    else:
        model = GemmScaleBatchNorm(case.shape[1], case.shape[2], device).to(case.dtype)
        bn = model.bn.float()
    with torch.no_grad():
        bn.weight.uniform_(0.5, 1.5)
        bn.bias.normal_()
        bn.running_mean.normal_(0.5, 0.1)
        bn.running_var.uniform_(0.05, 0.15)
    return model.train(case.training)


def random_input(case: Case, device: torch.device) -> Tensor:
    memory_format = torch.channels_last if case.channels_last else torch.contiguous_format
    x = torch.empty(case.input_shape, dtype=case.dtype, device=device, memory_format=memory_format)
    return x.uniform_()


def rotating_inputs(case: Case, device: torch.device) -> list[Tensor]:
    size = math.prod(case.input_shape) * case.dtype.itemsize
    return [random_input(case, device) for _ in range(rotations(size, device))]


def rotations(size: int, device: torch.device) -> int:
    """So many inputs of this many bytes that each has left the L2 cache when its turn comes again."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return max(2, min(32, 1 + math.ceil(2 * cache / size)))


def _batch_norm(model: nn.Module) -> nn.Module:
    return model if isinstance(model, nn.BatchNorm2d) else model.bn


def _as_variant(model: nn.Module) -> Variant:
    return Variant(model, model)


def _ours(case: Case, model: nn.Module, **switches: bool) -> Variant:
    device = next(model.parameters()).device
    module: nn.Module
    if case.kind == BN2D:
        module = cutlass_bn.BatchNorm2d(case.shape[1], device=device)
    else:
        module = cutlass_bn.LinearBatchNorm1d(case.shape[1], case.shape[2], scale=True, device=device, **switches)
        module = module.to(case.dtype)
        module.bn.float()
    module.load_state_dict(model.state_dict())
    return _as_variant(module.train(case.training))


def _compiled(model: nn.Module, mode: str | None) -> Variant:
    model = copy.deepcopy(model)
    return Variant(torch.compile(model, dynamic=False, mode=mode), model)


def compiled_whole(module: nn.Module) -> nn.Module:
    """Our module as users compile it; it raises where the graph would break."""
    return torch.compile(module, dynamic=False, fullgraph=True)


def _ours_compiled(case: Case, model: nn.Module) -> Variant:
    module = _ours(case, model).model
    return Variant(compiled_whole(module), module)


def _unfused(model: nn.Module) -> Variant:
    """cuBLAS, then our moments and normalise kernels. Scale and bias are folded beforehand, which flatters it."""
    bn = copy.deepcopy(model.bn)
    weight = (model.scale[:, None] * model.gemm.weight).detach()
    with torch.no_grad():
        bn.running_mean -= model.scale * model.gemm.bias

    def run(x: Tensor) -> Tensor:
        z = torch.mm(x, weight.t())
        return cutlass_bn.functional.batch_norm(
            z, bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.training, bn.momentum, bn.eps
        )

    return Variant(run)


Builders = dict[str, Callable[[], Variant]]


def variants(
    case: Case, model: nn.Module, compile: bool = True, max_autotune: bool = False, stepped: bool = False
) -> Builders:
    """A builder for every peer, eager first: the others' errors are judged by its. stepped: of training steps."""
    builders: Builders = {EAGER: lambda: _as_variant(copy.deepcopy(model))}
    if compile and case.compile:
        builders[COMPILE] = lambda: _compiled(model, None)
        if max_autotune:
            builders[MAX_AUTOTUNE] = lambda: _compiled(model, "max-autotune-no-cudagraphs")
    builders[OURS] = lambda: _ours(case, model)
    if stepped and compile and case.compile:
        builders[OURS_COMPILED] = lambda: _ours_compiled(case, model)
    if case.kind == GEMM_SCALE_BN and case.precision == "fp32" and case.training:
        builders[IEEE] = lambda: _ours(case, model, ieee_fp32=True)
    if case.kind == BN2D:
        builders[COPY] = lambda: Variant(torch.clone, checked=False)
    else:
        weight = model.gemm.weight.detach()
        builders[UNFUSED] = lambda: _unfused(model)
        builders[GEMM] = lambda: Variant(lambda x: torch.mm(x, weight.t()), checked=False)
    return builders


def limit(case: Case, timings: Mapping[str, Timing], ceilings: Mapping[str, float]) -> float | None:
    """Milliseconds of a copy of the tensor, or the GEMM alone; fp32: three fp16 products, its price on tensor cores."""
    if case.kind == BN2D:
        return timings[COPY].median if COPY in timings else None
    if case.precision == "fp32":
        return 3 * case.work[0] / ceilings["fp16"] / 1e9 if "fp16" in ceilings else None
    return timings[GEMM].median if GEMM in timings else None
