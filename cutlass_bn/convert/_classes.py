"""Classes made for containers that fuse: a container of class Base gets a subclass of Base, so that
it is the same object, with the same children and state dict, and only its forward is another."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

PLAN = "_fusion_plan"  # where a container keeps what it knows of its fused forward


class Plans(dict[bool, Any]):
    """That: by `training`. It names children and holds none, so that copies share it. Pickled it is
    empty, and made again.

    Copies don't make it, as torch.fx patches nn.Module for as long as it traces: for threads, too,
    that run some model meanwhile.
    """

    def __deepcopy__(self, memo: Any) -> Plans:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()


class Fusing:
    """A mixin for such a subclass. Its own subclasses say how a forward is fused.

    Names that a user's class won't have: an attribute here would hide a child of that name.
    """

    _fusing_base: Any  # what the container was
    _fusing_kind: Any  # what the generated class was made of, beside base

    @staticmethod
    def _fused_forward(base: type[nn.Module]) -> Any:
        raise NotImplementedError

    def _make_fusing_plan(self) -> None:
        """Sets PLAN. Called once the children are there."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = self.__dict__
        if hasattr(self, "__getstate__"):  # always from Python 3.11 on
            state = self.__getstate__()
        return _new, (self._fusing_kind, self._fusing_base), state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if not self.__dict__.get(PLAN):
            self._make_fusing_plan()


@functools.cache
def fusing_class(cls: Any, base: Any) -> type[nn.Module]:
    """The subclass of `base` that fuses as `cls` does. It has base's name."""
    members = {
        "_fusing_base": base,
        "_fusing_kind": cls,
        "forward": cls._fused_forward(base),
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
    return module._fusing_base if isinstance(module, Fusing) else type(module)


def is_fusing(module: nn.Module) -> bool:
    """Whether its class is one that was made here, and no subclass of one (parametrised, FSDP)."""
    return isinstance(module, Fusing) and type(module) is fusing_class(
        module._fusing_kind, module._fusing_base
    )


def why_no_subclass(cls: type) -> str | None:
    """Why none should be made of a class, which would notice, or None."""
    if type(cls) is not type:
        return f"its class has a metaclass, {type(cls).__name__}"
    if isinstance(cls.__init_subclass__, types.MethodType):
        return "its class keeps track of subclasses"
    return None


def why_no_class(base: type[nn.Module]) -> str | None:
    """Why containers of a class must keep it, or None."""
    if reason := why_no_subclass(base):
        return reason
    for name in ("__reduce_ex__", "__reduce__"):
        if getattr(base, name) is not getattr(object, name):
            return "its class pickles in a way of its own"
    for name in ("__deepcopy__", "__copy__"):
        if hasattr(base, name):
            return "its class copies in a way of its own"
    return None
