"""The variants of a case. All share the eager model's parameters and running statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutlass_bn

from .cases import BN2D, EVAL, STEP, TRAIN, Case
from .records import COMPILE, COPY, EAGER, GEMM, IEEE, OURS, OURS_COMPILED
from .timing import Call, Timing, rotations

# A gradient's name, by that of its parameter in the model, "bn." apart; others are d and the name.
GRADIENTS = {"weight": "dgamma", "bias": "dbeta", "gemm.weight": "dW", "gemm.bias": "dbias"}


class GemmScaleBatchNorm(nn.Module):
    """BatchNorm1d(scale * Linear(x)) in plain PyTorch."""

    def __init__(self, in_features: int, out_features: int, device: torch.device) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, device=device)
        self.scale = nn.Parameter(torch.randn(out_features, device=device))
        self.bn = nn.BatchNorm1d(out_features, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x) * self.scale)


class BatchNormAddAct(nn.Module):
    """A batch norm and what follows it in a ResNet, which ours does itself."""

    def __init__(self, bn: nn.Module, activation: str, residual: Tensor | None) -> None:
        super().__init__()
        self.bn, self.activation = bn, activation
        # A parameter, so that its gradient is one of the model's.
        self.residual = None if residual is None else nn.Parameter(residual)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.bn, cutlass_bn.BatchNorm2d):
            return self.bn(x, self.residual)
        y = self.bn(x)
        if self.residual is not None:
            y += self.residual
        return getattr(F, self.activation)(y, inplace=True)


def _bn2d(case: Case, bn: nn.Module, device: torch.device) -> nn.Module:
    if case.activation is None:
        return bn
    residual = empty(case, case.shape, device).normal_() if case.residual else None
    return BatchNormAddAct(bn, case.activation, residual)


def batch_norm_of(model: nn.Module) -> nn.Module:
    return getattr(model, "bn", model)


@dataclass(frozen=True)
class Variant:
    """A way to compute a case, or a part of it."""

    run: Callable[[Tensor], Tensor]
    model: nn.Module | None = None  # whose parameters and running statistics it uses

    def step(self, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """The gradients of x and of the parameters, none of them accumulated, so none copied."""
        return torch.autograd.grad(self.run(x), (x, *self.model.parameters()), dy)

    def results(self, x: Tensor, dy: Tensor | None) -> dict[str, Tensor]:
        """What is compared with float64: gradients where there is a dy, else y and the state."""
        if dy is not None:
            names = ["x", *(n.removeprefix("bn.") for n, _ in self.model.named_parameters())]
            found = zip(names, self.step(x, dy), strict=True)
            return {GRADIENTS.get(name, f"d{name}"): gradient for name, gradient in found}
        y, bn = self.run(x), batch_norm_of(self.model)
        return {"y": y, "running_mean": bn.running_mean, "running_var": bn.running_var}

    def timed(self, inputs: list[tuple[Tensor, Tensor | None]]) -> Call:
        """A step where there is a dy and a model, else a forward."""
        if inputs[0][1] is not None and self.model is not None:
            return lambda i: self.step(*inputs[i % len(inputs)])
        return lambda i: self.run(inputs[i % len(inputs)][0])


def eager_model(case: Case, device: torch.device) -> nn.Module:
    """With random parameters and running statistics. BatchNorm stays in float32."""
    if case.kind == BN2D:
        model = _bn2d(case, nn.BatchNorm2d(case.shape[1], device=device), device)
    else:
        model = GemmScaleBatchNorm(*case.shape[1:], device).to(case.dtype)
    bn = batch_norm_of(model).float()
    with torch.no_grad():
        bn.weight.uniform_(0.5, 1.5)
        bn.bias.normal_()
        bn.running_mean.normal_(0.5, 0.1)
        bn.running_var.uniform_(0.05, 0.15)
    return model.train(case.mode != EVAL)


def our_model(case: Case, model: nn.Module, **switches: bool) -> nn.Module:
    device = next(model.parameters()).device
    if case.kind == BN2D:
        bn = cutlass_bn.BatchNorm2d(case.shape[1], activation=case.activation)
        ours = _bn2d(case, bn, device)
    else:
        ours = cutlass_bn.LinearBatchNorm1d(*case.shape[1:], scale=True, **switches).to(case.dtype)
    batch_norm_of(ours).float()
    ours.to(device).load_state_dict(model.state_dict())
    return ours.train(case.mode != EVAL)


def empty(case: Case, shape: tuple[int, ...], device: torch.device) -> Tensor:
    order = torch.channels_last if case.channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=case.dtype, device=device, memory_format=order)


def random_input(case: Case, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(x, y's gradient of a step)."""
    x = empty(case, case.input_shape, device).uniform_()
    if case.mode != STEP:
        return x, None
    return x.requires_grad_(), empty(case, case.output_shape, device).normal_()


def random_inputs(case: Case, device: torch.device) -> list[tuple[Tensor, Tensor | None]]:
    """So many that each has left the L2 cache when its turn comes again."""
    size = math.prod(case.input_shape) * case.dtype.itemsize
    return [random_input(case, device) for _ in range(rotations(size, device))]


def _variant(model: nn.Module, **compile: bool) -> Variant:
    """compile: torch.compile's arguments, if it is to be compiled."""
    return Variant(torch.compile(model, **compile) if compile else model, model)


Builders = dict[str, Callable[[], Variant]]


def variants(case: Case, model: nn.Module, compile: bool) -> Builders:
    """A builder for every peer, eager first: the others' errors are judged by its."""
    gemm, compile = case.kind != BN2D, compile and case.compile
    builders: Builders = {EAGER: lambda: _variant(copy.deepcopy(model))}
    if compile:
        builders[COMPILE] = lambda: _variant(copy.deepcopy(model), dynamic=False)
    builders[OURS] = lambda: _variant(our_model(case, model))
    if compile and case.mode == STEP:  # as users compile it; this raises where the graph breaks
        compiled = {"dynamic": False, "fullgraph": True}
        builders[OURS_COMPILED] = lambda: _variant(our_model(case, model), **compiled)
    if gemm and case.precision == "fp32" and case.mode == TRAIN:
        builders[IEEE] = lambda: _variant(our_model(case, model, ieee_fp32=True))
    # The limits never have a graph.
    if gemm:
        weight = model.gemm.weight.detach()
        builders[GEMM] = lambda: Variant(lambda x: torch.mm(x.detach(), weight.t()))
    else:
        builders[COPY] = lambda: Variant(lambda x: x.detach().clone())
    return builders


def limit(case: Case, timings: Mapping[str, Timing], ceilings: Mapping[str, float]) -> float | None:
    """Milliseconds of the copies or products that the case takes at least; None without them."""
    # An fp32 product costs three fp16 ones on tensor cores.
    if case.kind != BN2D and case.precision == "fp32":
        return 3 * case.work[0] / ceilings["fp16"] / 1e9 if "fp16" in ceilings else None
    peer = timings.get(COPY if case.kind == BN2D else GEMM)
    return case.passes * peer.ms if peer else None
