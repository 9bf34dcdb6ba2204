"""Containers with a forward of their own, such as the blocks of a ResNet: a graph of the forward,
with BatchNorm, addition and activation made one call, for as long as all is as it was traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..modules._fusible import NORMS
from ._classes import PLAN, Fusing, Plans, base_of
from ._fuse import Fusion, fuse
from ._trace import NotTraceable, is_same, observe, trace


class Plan(NamedTuple):
    """The fused forward of a container, and what must be so for it to stand for its own."""

    function: Callable[..., Any]
    arguments: int
    theirs: Callable[..., Any]  # the forward that was traced
    observed: tuple[tuple[str, Any], ...]
    fusions: tuple[Fusion, ...]

    def fits(self, module: Any, args: tuple[Any, ...]) -> bool:
        """Whether the function stands for a call with these arguments."""
        if len(args) != self.arguments:
            return False
        for argument in args:
            if type(argument) is not Tensor:
                return False
        return self.is_as_traced(module) and not _has_any_global_hook()

    def is_as_traced(self, module: Any) -> bool:
        if module._fusing_base.forward is not self.theirs:
            return False
        children = module._modules
        for name, value in self.observed:
            # Most are children; `observe` would say the same of them, and take longer.
            if type(children.get(name)) is value:
                continue
            if not is_same(observe(module, name), value):
                return False
        for fusion in self.fusions:  # noqa: SIM110, at every call
            if not fusion.fits(children):
                return False
        return True


class FusingBlock(Fusing):
    """A container with plans, for training and for evaluation."""

    @staticmethod
    def _fused_forward(base: Any) -> Any:
        @functools.wraps(base.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            plans = self.__dict__.get(PLAN)
            if plans and not kwargs:
                plan = plans.get(self.training)
                if plan is not None and plan.fits(self, args):
                    return plan.function(self, *args)
            return base.forward(self, *args, **kwargs)

        return forward

    def _make_fusing_plan(self) -> None:
        module: Any = self
        try:
            module.__dict__[PLAN] = plans_of(module)
        except NotTraceable:
            module.__dict__.pop(PLAN, None)


def plans_of(module: nn.Module) -> Plans:
    """By `training`.

    Raises:
        NotTraceable: there is no plan.
    """
    if not any(type(child) in NORMS for child in module.children()):
        raise NotTraceable("no BatchNorm of ours is its child")
    if "forward" in module.__dict__:
        raise NotTraceable("its forward is patched")
    if base_of(module).forward is nn.Module.forward:
        raise NotTraceable("it has no forward")
    training = module.training
    plan = _plan_of(module)
    plans = Plans({True: plan, False: plan})
    if any(name == "training" for name, _ in plan.observed):
        module.__dict__["training"] = not training  # of the container alone
        try:
            plans[not training] = _plan_of(module)
        finally:
            module.__dict__["training"] = training
    return plans


def _plan_of(module: nn.Module) -> Plan:
    base = base_of(module)
    graph, observed = trace(module, base)
    arguments = sum(node.op == "placeholder" for node in graph.nodes)
    fusions = fuse(graph, module)
    code = graph.python_code("self")
    exec(code.src, code.globals)
    return Plan(code.globals["forward"], arguments, base.forward, observed, fusions)
