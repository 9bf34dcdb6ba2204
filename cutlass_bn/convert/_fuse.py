"""BatchNorm, addition and activation in a graph, made one call."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .._activations import ACTIVATIONS
from ..modules._fusible import NORMS, activation_of, is_fusible, is_identity
from ..modules.batch_norm import normalise
from ..ops._layout import is_dense

_ADDITIONS = (operator.add, torch.add, "add")
_IN_PLACE = (operator.iadd, "add_")
_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    "relu": "relu",
    "relu_": "relu",
    F.leaky_relu: "leaky_relu",
    F.gelu: "gelu",
    F.silu: "silu",
}
_SETTINGS = {"negative_slope": 0.01, "approximate": "none"}
# Modules whose output is new memory: nothing but who is given the output can change it.
_FRESH = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class Fusion(NamedTuple):
    """What one call stands for."""

    norm: str  # names of children
    identities: tuple[str, ...]
    source: str | None  # what makes the norm's input, where that matters
    residual: bool
    activation: str | None
    layer: str | None  # the activation's child; None: a function

    def fits(self, children: dict[str, Any]) -> bool:
        """Whether no child involved was hooked or changed. Their classes are the same."""
        norm = children[self.norm]
        if not is_fusible(norm) or not norm.is_bare():
            return False
        if self.layer is not None and activation_of(children[self.layer]) != self.activation:
            return False
        if self.source is not None and not is_fusible(children[self.source]):
            return False
        return all(is_identity(children[name]) for name in self.identities)


def normalise_and_add(norm: Any, input: Tensor, residual: Any, activation: str | None) -> Tensor:
    """activation(norm(input) + residual)."""
    if _may_add(input, residual):
        return normalise(norm, input, residual, activation)
    return ACTIVATIONS[activation].forward(normalise(norm, input, None, None) + residual)


def add_normalised(norm: Any, input: Tensor, residual: Any, activation: str | None) -> Tensor:
    """activation(residual + norm(input)), of which the first operand gives the strides."""
    if _may_add(input, residual) and residual.stride() == input.stride() and is_dense(input):
        return normalise(norm, input, residual, activation)
    return ACTIVATIONS[activation].forward(residual + normalise(norm, input, None, None))


def normalise_and_iadd(norm: Any, input: Tensor, residual: Any, activation: str | None) -> Tensor:
    """The same by `+=`, which keeps the dtype where `+` promotes it."""
    if _may_add(input, residual):
        return normalise(norm, input, residual, activation)
    y = normalise(norm, input, None, None)
    y += residual
    return ACTIVATIONS[activation].forward(y)


def _may_add(input: Tensor, residual: Any) -> bool:
    """Whether our residual is torch's addition: no broadcast, no promotion."""
    return (
        isinstance(residual, Tensor)
        and residual.dtype == input.dtype
        and residual.shape == input.shape
        and residual.device == input.device
    )


def fuse(graph: fx.Graph, module: nn.Module) -> tuple[Fusion, ...]:
    """Rewrites the graph of a module's forward. Says what was fused."""
    children: dict[str, Any] = dict(module._modules)
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    found = []
    for node in list(graph.nodes):
        if node.op == "call_module" and calls.count(str(node.target)) == 1:
            fusion = _fuse_at(graph, node, children)
            if fusion is not None:
                found.append(fusion)
    return tuple(found)


def _fuse_at(graph: fx.Graph, node: fx.Node, children: dict[str, Any]) -> Fusion | None:
    """With the norm that is called at a certain node."""
    norm = children[str(node.target)]
    if type(norm) not in NORMS or not is_fusible(norm) or not norm.is_bare():
        return None
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return None
    chain, identities = [node], []

    def follow() -> fx.Node | None:
        """What alone takes the value so far, past identities."""
        while len(chain[-1].users) == 1:
            user = next(iter(chain[-1].users))
            if user.op != "call_module" or not is_identity(children[str(user.target)]):
                return user
            identities.append(str(user.target))
            chain.append(user)
        return None

    add, function, residual, source = None, normalise, None, None
    user = follow()
    if user is not None and (addition := _addition(user, chain[-1])) is not None:
        sources = _movable_to(user, node, chain, children)
        if sources is not None:
            function, residual = addition
            (source,), add = sources, user
            chain.append(user)
            user = follow()
    activation = None if user is None else _activation(user, chain[-1], children)
    layer = None
    if residual is not None and ACTIVATIONS[activation].is_curved:
        # The backward takes the residual, where torch's takes a sum that nothing else can change.
        activation = None if _is_used_behind(user, residual, children) else activation
    if user is not None and activation is not None:
        chain.append(user)
        layer = str(user.target) if user.op == "call_module" else None
    elif add is None:
        return None
    else:
        while chain[-1] is not add:  # identities behind it stay
            identities.remove(str(chain.pop().target))
    with graph.inserting_before(node if add is None else add):
        itself = graph.get_attr(str(node.target))
        fused = graph.call_function(function, (itself, node.args[0], residual, activation))
    chain[-1].replace_all_uses_with(fused)
    for part in reversed(chain):
        graph.erase_node(part)
    return Fusion(str(node.target), tuple(identities), source, add is not None, activation, layer)


def _addition(user: fx.Node, value: fx.Node) -> tuple[Any, fx.Node] | None:
    """The fused function and the residual, where `user` adds something to `value`."""
    in_place = user.target in _IN_PLACE
    if not in_place and user.target not in _ADDITIONS:
        return None
    if user.op == "call_module" or len(user.args) != 2 or user.kwargs:
        return None
    left, right = user.args
    if in_place and left is not value:  # that changes another tensor
        return None
    residual = right if left is value else left
    if not isinstance(residual, fx.Node) or residual is value:
        return None
    if in_place:
        return normalise_and_iadd, residual
    return (normalise_and_add if left is value else add_normalised), residual


def _movable_to(
    end: fx.Node, node: fx.Node, chain: list[fx.Node], children: dict[str, Any]
) -> tuple[str | None] | None:
    """Whether the norm may be called only where the addition is: then its input's source, if that
    matters. What runs in between must change neither the input nor the norm."""
    between, at = [], node.next
    while at is not end:
        if at not in chain:
            between.append(at)
        at = at.next
    if not between:
        return (None,)
    source: Any = node.args[0]
    if source.op != "call_module" or len(source.users) != 1:
        return None
    maker = children[str(source.target)]
    if type(maker) not in _FRESH or not is_fusible(maker):
        return None
    norm = children[str(node.target)]
    for other in between:
        if other.op == "call_module" and norm in children[str(other.target)].modules():
            return None
    return (str(source.target),)


def _is_used_behind(node: Any, value: fx.Node, children: dict[str, Any]) -> bool:
    """Whether a value, or what it may share memory with, is used behind a node."""
    behind, at = set(), node.next
    while at.op != "root":
        behind.add(at)
        at = at.next
    values = [value]
    for value in values:
        if not behind.isdisjoint(value.users):
            return True
        if value.op != "call_module" or type(children[str(value.target)]) not in _FRESH:
            values += [node for node in value.all_input_nodes if node not in values]
    return False


def _activation(user: fx.Node, value: fx.Node, children: dict[str, Any]) -> str | None:
    """The name of the activation that `user` is of `value`, or None."""
    if user.args != (value,):
        return None
    if user.op == "call_module":
        return None if user.kwargs else activation_of(children[str(user.target)])
    if any(_SETTINGS.get(k, v) != v for k, v in user.kwargs.items()):
        return None
    if user.op not in ("call_function", "call_method"):
        return None
    return _FUNCTIONS.get(user.target)
