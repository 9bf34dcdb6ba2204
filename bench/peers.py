"""The variants of a case. All share the eager model's parameters and running statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import cutlass_bn

from .cases import BN2D, EVAL, STEP, TRAIN, Case
from .records import COMPILE, COPY, EAGER, GEMM, IEEE, OURS, OURS_COMPILED
from .timing import Call, Timing, rotations

# A gradient's name, by that of its parameter in the model, "bn." apart.
BATCH_NORM = {"weight": "dgamma", "bias": "dbeta"}
GRADIENTS = {**BATCH_NORM, "gemm.weight": "dW", "gemm.bias": "dbias", "scale": "dscale"}


class GemmScaleBatchNorm(nn.Module):
    """BatchNorm1d(scale * Linear(x)) in plain PyTorch."""

    def __init__(self, in_features: int, out_features: int, device: torch.device) -> None:
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, device=device)
        self.scale = nn.Parameter(torch.randn(out_features, device=device))
        self.bn = nn.BatchNorm1d(out_features, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.gemm(x) * self.scale)


def batch_norm_of(model: nn.Module) -> nn.Module:
    return model if isinstance(model, nn.BatchNorm2d) else model.bn


@dataclass(frozen=True)
class Variant:
    """A way to compute a case, or a part of it."""

    run: Callable[[Tensor], Tensor]
    model: nn.Module | None = None  # whose parameters and running statistics it uses

    def drop_gradients(self, x: Tensor) -> None:
        for tensor in (x, *self.model.parameters()):
            tensor.grad = None

    def step(self, x: Tensor, dy: Tensor) -> None:
        """Leaves the gradients in x and the model."""
        self.drop_gradients(x)
        self.run(x).backward(dy)

    def results(self, x: Tensor, dy: Tensor | None) -> dict[str, Tensor]:
        """What is compared with float64: gradients where there is a dy, else y and the state."""
        if dy is not None:
            self.step(x, dy)
            named = ((n.removeprefix("bn."), p) for n, p in self.model.named_parameters())
            return {"dx": x.grad, **{GRADIENTS[name]: p.grad for name, p in named}}
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
        model = nn.BatchNorm2d(case.shape[1], device=device)
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
    if case.kind == BN2D:
        ours = cutlass_bn.BatchNorm2d(case.shape[1])
    else:
        ours = cutlass_bn.LinearBatchNorm1d(*case.shape[1:], scale=True, **switches).to(case.dtype)
    batch_norm_of(ours).float()
    ours.to(next(model.parameters()).device).load_state_dict(model.state_dict())
    return ours.train(case.mode != EVAL)


def random_input(case: Case, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(x, y's gradient of a step)."""
    order = torch.channels_last if case.channels_last else torch.contiguous_format
    like = {"dtype": case.dtype, "device": device, "memory_format": order}
    x = torch.empty(case.input_shape, **like).uniform_()
    if case.mode != STEP:
        return x, None
    return x.requires_grad_(), torch.empty(case.output_shape, **like).normal_()


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
    return case.passes * peer.median if peer else None
