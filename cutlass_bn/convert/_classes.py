"""Classes made for containers that fuse: a container of class Base gets a subclass of Base, so that
it is the same object, with the same children and state dict, and only its forward is another."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

PLAN = "_fusion_plan"  # what a container knows of its fused forward; made again, not pickled


class Fusing:
    """A mixin for such a subclass. Its own subclasses say how a forward is fused."""

    base: type[nn.Module]  # what the container was
    kind: type[Fusing]  # what the generated class was made of, beside base

    @staticmethod
    def fused_forward(base: type[nn.Module]) -> Any:
        raise NotImplementedError

    def make_plan(self) -> None:
        """Sets PLAN. Called once the children are there."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = self.__dict__
        if hasattr(self, "__getstate__"):  # always from Python 3.11 on
            state = self.__getstate__()
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != PLAN}
        return _new, (self.kind, self.base), state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.make_plan()


@functools.cache
def fusing_class(cls: Any, base: Any) -> type[nn.Module]:
    """The subclass of `base` that fuses as `cls` does. It has base's name."""
    members = {
        "base": base,
        "kind": cls,
        "forward": cls.fused_forward(base),
        "__module__": __name__,  # not "torch.nn.modules", of which dynamo leaves state unguarded
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return types.new_class(base.__name__, (cls, base), exec_body=lambda body: body.update(members))


def _new(cls: Any, base: Any) -> nn.Module:
    """A container without its state, for pickle and copy."""
    generated = fusing_class(cls, base)
    return generated.__new__(generated)


def base_of(module: nn.Module) -> Any:
    """The module's class before it was made to fuse."""
    return module.base if isinstance(module, Fusing) else type(module)


def why_no_class(base: type[nn.Module]) -> str | None:
    """Why containers of a class must keep it, or None."""
    for name in ("__reduce_ex__", "__reduce__"):
        if getattr(base, name) is not getattr(object, name):
            return "its class pickles in a way of its own"
    for name in ("__deepcopy__", "__copy__"):
        if hasattr(base, name):
            return "its class copies in a way of its own"
    return None
