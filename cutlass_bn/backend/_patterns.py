"""Finds in a graph of Dynamo's what one call of `cutlass_bn.functional` can stand for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import functional
from .._library import library_is_loaded
from ..functional._policy import KERNEL_DTYPES

Call = Callable[..., Any] | str  # what a node calls: a function, or a method by its name


class Fusion(NamedTuple):
    """Nodes, in the graph's order, of which the last one's result is function(**arguments)."""

    nodes: list[fx.Node]
    function: Callable[..., Tensor]
    arguments: dict[str, Any]

    def extended(self, node: fx.Node, **arguments: Any) -> Fusion:
        return Fusion([*self.nodes, node], self.function, {**self.arguments, **arguments})


# The arguments' names, in order.
_BATCH_NORM: dict[Call, str] = {
    F.batch_norm: "input running_mean running_var weight bias training momentum eps",
    torch.batch_norm: "input weight bias running_mean running_var training momentum eps cudnn",
}
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}

# Which activation a call is, with its other arguments as given here.
_ACTIVATIONS: dict[Call, tuple[str, dict[str, Any]]] = {
    F.relu: ("relu", {"inplace": False}),
    torch.relu: ("relu", {}),
    torch.relu_: ("relu", {}),
    "relu": ("relu", {}),
    "relu_": ("relu", {}),
    F.leaky_relu: ("leaky_relu", {"negative_slope": 0.01, "inplace": False}),
    torch._C._nn.leaky_relu_: ("leaky_relu", {"negative_slope": 0.01}),
    F.silu: ("silu", {"inplace": False}),
    F.gelu: ("gelu", {"approximate": "none"}),
}

# Whether a call takes its operands in either order, or makes the first one its result.
_SUMS: dict[Call, bool] = {
    operator.add: True,
    torch.add: True,
    "add": True,
    operator.iadd: False,
    "add_": False,
}
_PRODUCTS: dict[Call, bool] = {
    operator.mul: True,
    torch.mul: True,
    "mul": True,
    operator.imul: False,
    "mul_": False,
}


def is_plain(value: Any) -> bool:
    """Whether a value that Dynamo had is a tensor, and no subclass that stands for others."""
    return isinstance(value, FakeTensor) and value.layout is torch.strided


def tensor_of(node: Any) -> FakeTensor | None:
    """The plain tensor that a node stands for; None where it is another thing."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if is_plain(value) else None


def find(node: fx.Node) -> list[Fusion]:
    """The fusions around a batch norm, if the node is one: the larger first."""
    alone = find_alone(node)
    if alone is None:
        return []
    linear = _with_linear(alone)
    found = (
        linear and _with_activation(linear),
        linear,
        _with_activation(_with_residual(alone) or alone),
    )
    return [fusion for fusion in found if fusion is not None]


def find_alone(node: fx.Node) -> Fusion | None:
    """A batch norm by itself, if the node is one that our kernels take."""
    names = _BATCH_NORM.get(node.target) if _is_call(node) else None
    if names is None:
        return None
    arguments = _bind(node, names, _DEFAULTS)
    arguments.pop("cudnn", None)
    training = arguments["training"]
    vectors = [arguments[name] for name in ("running_mean", "running_var", "weight", "bias")]
    has_statistics = [vector is not None for vector in vectors[:2]]
    if not isinstance(training, bool) or any(has_statistics) != all(has_statistics):
        return None
    if not _ours(arguments["input"]) or not (training or all(has_statistics)):
        return None
    if not all(vector is None or _ours(vector) for vector in vectors):
        return None
    return Fusion([node], functional.batch_norm, arguments)


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def _bind(node: fx.Node, names: str, defaults: dict[str, Any]) -> dict[str, Any]:
    given = {**dict(zip(names.split(), node.args, strict=False)), **node.kwargs}
    return {**given, **{name: value for name, value in defaults.items() if name not in given}}


def _ours(node: Any) -> bool:
    """Whether our kernels, or on the CPU what stands for them, take the tensor."""
    value = tensor_of(node)
    if value is None or value.dtype not in KERNEL_DTYPES:
        return False
    return value.is_cpu or (value.is_cuda and library_is_loaded())


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(node: fx.Node, value: fx.Node, calls: dict[Call, bool]) -> fx.Node | None:
    """The other operand of a sum or product that has value as one of its two."""
    if not _is_call(node) or node.target not in calls:
        return None
    given = _bind(node, "input other", {"alpha": 1})
    operands = [given.pop("input", None), given.pop("other", None)]
    if given != {"alpha": 1} or value not in operands:
        return None
    if operands[0] is not value and not calls[node.target]:
        return None
    other = operands[1] if operands[0] is value else operands[0]
    return other if other is not value and tensor_of(other) is not None else None


def _with_residual(fusion: Fusion) -> Fusion | None:
    """And what is added to its result, if that is of the same shape and dtype."""
    last = fusion.nodes[-1]
    user, y = _only_user(last), tensor_of(last)
    residual = None if user is None else _other(user, last, _SUMS)
    x = tensor_of(residual)
    if user is None or x is None or y is None:
        return None
    if x.dtype != y.dtype or x.device != y.device or x.dim() != y.dim():
        return None
    if not _are_equal(x.shape, y.shape):
        return None
    if user.args[:1] != (last,) and not _are_equal(x.stride(), y.stride()):
        return None  # the sum lies as its first operand does
    return fusion.extended(user, residual=residual)


def _are_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(statically_known_true(a == b) for a, b in zip(sizes, others, strict=True))


def _with_activation(fusion: Fusion) -> Fusion | None:
    last = fusion.nodes[-1]
    user = _only_user(last)
    if user is None or not _is_call(user) or user.target not in _ACTIVATIONS:
        return None
    name, settings = _ACTIVATIONS[user.target]
    given = _bind(user, "input " + " ".join(settings), settings)
    fits = all(given[key] == setting for key, setting in settings.items() if key != "inplace")
    return fusion.extended(user, activation=name) if fits and given.get("input") is last else None


def _with_linear(alone: Fusion) -> Fusion | None:
    """And the linear layer, with a factor per feature or without, that a batch norm normalises."""
    arguments = dict(alone.arguments)
    z: fx.Node = arguments.pop("input")
    if _only_user(z) is not alone.nodes[0]:
        return None
    nodes, linear = [z], z
    scale: fx.Node | None = None
    if _is_call(z) and z.target in _PRODUCTS:
        factors = [node for node in z.all_input_nodes if node.target is F.linear]
        linear = factors[0] if factors else z
        scale = _other(z, linear, _PRODUCTS)
        if scale is None or _only_user(linear) is not z or not _is_factor(scale, linear, z):
            return None
        nodes = [linear, z]
    if linear.target is not F.linear:
        return None
    operands = _bind(linear, "input weight bias", {"bias": None})
    x = tensor_of(operands["input"])
    if x is None or x.dim() != 2:
        return None
    if not all(operand is None or _ours(operand) for operand in operands.values()):
        return None
    affine = {"gamma": arguments.pop("weight"), "beta": arguments.pop("bias")}
    arguments = {**operands, "scale": scale, **affine, **arguments}
    return Fusion([*nodes, *alone.nodes], functional.linear_batch_norm, arguments)


def _is_factor(scale: fx.Node, linear: fx.Node, product: fx.Node) -> bool:
    """Whether the product is of a dtype that both have a part in, and scale is [N]."""
    factor, u, z = tensor_of(scale), tensor_of(linear), tensor_of(product)
    if factor is None or u is None or z is None or not _ours(scale) or factor.dim() != 1:
        return False
    return (
        z.dtype == torch.promote_types(u.dtype, factor.dtype)
        and factor.device == u.device
        and statically_known_true(factor.size(0) == u.size(-1))
    )
