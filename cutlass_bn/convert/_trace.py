"""A module's forward as a graph of calls of its children, if a graph says all that it does.

torch.fx runs the forward once, with stand-ins for its tensors, and notes the calls. What it would
overlook makes a module untraceable here: grad and autocast modes, tensors and random numbers made
in the forward, what it stores, tests of its inputs. What it reads of the module is noted, for a
check that it is still so.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import operator
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from ._classes import why_no_subclass

_MODULES = ("torch", "math", "operator")
# Of these, those that ask what a stand-in cannot say raise.
_BUILTINS = {"isinstance", "len", "range", "zip", "enumerate", "reversed", "tuple", "list", "dict"}
_BUILTINS |= {"bool", "int", "float", "str", "min", "max", "sum", "abs", "slice", "super"}
_HARMLESS_QUESTIONS = ("is_scripting", "is_tracing")
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_EFFECTS = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME")
_READ = "_noted_read"  # the name of our function that stands between code and an attribute
_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_MISSING = object()


class NotTraceable(Exception):
    """Says why."""


class Traced(NamedTuple):
    graph: fx.Graph
    observed: tuple[tuple[str, Any], ...]  # what the forward read of the module, as `observe` gives


def trace(module: nn.Module, base: type[nn.Module]) -> Traced:
    """The graph of base.forward for the module, with its children as leaves.

    Raises:
        NotTraceable: there is none.
    """
    for parameter in list(inspect.signature(base.forward).parameters.values())[1:]:
        plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if not plain or parameter.default is not parameter.empty:
            raise NotTraceable(f"its forward has an optional argument, {parameter.name}")
        if parameter.name == "self":  # torch.fx leaves it out
            raise NotTraceable("its forward has an argument called self")
    recorder = _Recorder(module)
    tracer = _Tracer(recorder)
    # A forward that sets the mode ends before it sets it back.
    with recorder.recording(base), torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            graph = tracer.trace(module)
        except NotTraceable:
            raise
        except Exception as error:
            raise NotTraceable(f"torch.fx cannot trace it ({error})") from error
    if any("." in str(node.target) for node in graph.nodes if node.op == "call_module"):
        raise NotTraceable("it calls children of its children")
    return Traced(graph, tuple((name, observe(module, name)) for name in sorted(recorder.reads)))


def observe(module: nn.Module, name: str) -> Any:
    """What a graph may depend on of an attribute: a child's class, that a tensor is there, or the
    value of anything else."""
    children = module._modules
    if name in children:
        return type(children[name])
    for tensors in (module._parameters, module._buffers):
        if name in tensors:
            return tensors[name] is None
    value = module.__dict__.get(name, _MISSING)
    return getattr(type(module), name, _MISSING) if value is _MISSING else value


def is_same(value: Any, other: Any) -> bool:
    """Whether two observations are; 1 and 1.0 aren't, of which a graph's dtypes may depend."""
    if type(value) is not type(other):
        return False
    if type(value) is tuple:
        return len(value) == len(other) and all(map(is_same, value, other))
    # Of other things `==` may say anything: tensors are compared by their elements.
    return value is other or (isinstance(value, _CONSTANTS) and value == other)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, (*_CONSTANTS, *_FUNCTIONS))


def _is_method(module: nn.Module, cls: type[nn.Module], name: str) -> bool:
    """Whether an attribute is code of the class."""
    value = inspect.getattr_static(cls, name, None)
    return name not in module.__dict__ and isinstance(value, (types.FunctionType, property))


def _is_torchs(frame: types.FrameType | None) -> bool:
    name = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return name.split(".")[0] in ("torch", "cutlass_bn")


class _Recorder:
    """Notes what a forward reads of the module, and raises before it does what no graph shows."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reads: set[str] = set()
        self.codes: set[types.CodeType] = set()  # of the forward and what it calls

    @contextmanager
    def recording(self, base: type[nn.Module]) -> Iterator[None]:
        """Gives the module and its children classes that note reads, for the time being."""
        module: Any
        classes: dict[Any, type] = {self.module: base}
        classes.update((child, type(child)) for child in self.module.children())
        before = {module: type(module) for module in classes}
        for cls in classes.values():
            if reason := why_no_subclass(cls):
                raise NotTraceable(f"{cls.__name__}: {reason}")
        try:
            for module, cls in classes.items():
                module.__class__ = self._noting(cls, module is self.module)
            yield
        finally:
            for module, cls in before.items():
                module.__class__ = cls

    def _noting(self, cls: Any, is_parent: bool) -> type:
        def _noted_read(module: Any, name: str) -> Any:
            if not _is_torchs(sys._getframe(1)):
                if not is_parent:
                    raise NotTraceable(f"it reads {name} of a child")
                if not _is_method(module, cls, name):  # its code is looked at when it runs
                    self._check(name)
                self.reads.add(name)
            return cls.__getattribute__(module, name)

        return types.new_class(
            cls.__name__, (cls,), exec_body=lambda body: body.update(__getattribute__=_noted_read)
        )

    def _check(self, name: str) -> None:
        value = observe(self.module, name)
        if name in self.module._modules:
            if issubclass(value, (nn.ModuleList, nn.ModuleDict)):
                raise NotTraceable(f"it goes through the list {name}")
        elif not _is_constant(value):
            raise NotTraceable(f"it reads {name}")

    def profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        """For sys.setprofile."""
        if event == "call":
            name = frame.f_code.co_name
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                raise NotTraceable("it checkpoints activations")
            caller = frame.f_back
            while caller is not None and caller.f_code.co_name == _READ:
                caller = caller.f_back
            is_called_by_forward = caller is not None and caller.f_code in self.codes
            if not _is_torchs(frame) and (is_called_by_forward or not self.codes):
                self.codes.add(frame.f_code)
                _check_code(frame.f_code, frame.f_globals)
                return
        elif event == "c_call":
            name, caller = getattr(argument, "__name__", ""), frame
        else:
            return
        if name.startswith("is_") and name not in _HARMLESS_QUESTIONS and not _is_torchs(caller):
            raise NotTraceable(f"it asks {name}")


def _check_code(code: types.CodeType, names: dict[str, Any]) -> None:
    """Raises for code that does, or might do, what no graph shows."""
    for name in code.co_freevars:
        if name != "__class__":
            raise NotTraceable(f"it reads {name} of an outer function")
    for instruction in dis.get_instructions(code):
        if instruction.opname in _EFFECTS:
            raise NotTraceable(f"it stores or imports {instruction.argval}")
        if instruction.opname != "LOAD_GLOBAL":
            continue
        name = instruction.argval
        value = names.get(name, getattr(builtins, name, None))
        if isinstance(value, types.ModuleType):
            known = value.__name__.split(".")[0] in _MODULES
        elif name not in names:
            known = name in _BUILTINS
        else:
            known = isinstance(value, (type, *_FUNCTIONS))
        if not known:
            raise NotTraceable(f"it reads {name}")


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise NotTraceable("it changes grad or autocast modes")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, fx.Proxy):
            raise NotTraceable("it uses a tensor that is not one of its own")
        return super().create_arg(a)

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> Any:
        function, arguments = super().create_args_for_root(*args, **kwargs)

        def watched(*args: Any) -> Any:
            before = sys.getprofile()
            with _NoTensors():
                sys.setprofile(self.recorder.profile)
                try:
                    return function(*args)
                finally:
                    sys.setprofile(before)

        return watched, arguments


class _Proxy(fx.Proxy):
    """Refuses to say of which class it is, as it stands for tensors."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if _is_torchs(sys._getframe(1)):
            return _Proxy
        raise NotTraceable("it asks for the class of an input")


def _in_place(name: str) -> Any:
    """fx's stand-in takes `a += b` for `a = a + b`, which has another dtype and changes no a."""
    function = getattr(operator, name)

    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in _IN_PLACE:
    setattr(_Proxy, f"__i{_name}__", _in_place(f"i{_name}"))


class _NoTensors(TorchFunctionMode):
    """Refuses calls that no stand-in is part of: they would run now, once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if not _is_torchs(caller) and not any(issubclass(cls, fx.Proxy) for cls in types):
            raise NotTraceable(f"it calls {getattr(func, '__name__', func)} on no input of its own")
        return func(*args, **kwargs)


def _modes() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
    )
