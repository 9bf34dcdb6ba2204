"""Puts calls of `cutlass_bn.functional` into a graph of Dynamo's, where they change nothing else.

A call stands where the last of the nodes stood that it replaces, so that all of them move there.
This graph is not functional: nodes between may change tensors, or how operations are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch._ops import OperatorBase, OpOverloadPacket
from torch.utils import _pytree as pytree

from .. import functional
from .._activations import ACTIVATIONS
from ._patterns import Fusion, find, find_alone, is_plain

_OURS = (functional.batch_norm, functional.linear_batch_norm)
_STATISTICS = ("running_mean", "running_var")


def rewrite(graph_module: fx.GraphModule) -> int:
    """Replaces what can be fused, and returns how many calls of ours there are then."""
    graph = graph_module.graph
    count = _replace(graph, find)
    if count:
        count += _replace(graph, _find_alone(graph))
        graph_module.recompile()
    return count


def _replace(graph: fx.Graph, find: Callable[[fx.Node], list[Fusion]]) -> int:
    """By the first of the fusions found at a node that can be."""
    count = 0
    for node in list(graph.nodes):
        fusion = next(filter(_can_move, find(node)), None)
        if fusion is None:
            continue
        last = fusion.nodes[-1]
        with graph.inserting_before(last):
            new = graph.call_function(fusion.function, kwargs=fusion.arguments)
        new.meta = last.meta.copy()
        last.replace_all_uses_with(new)
        for old in reversed(fusion.nodes):
            graph.erase_node(old)
        count += 1
    return count


def _find_alone(graph: fx.Graph) -> Callable[[fx.Node], list[Fusion]]:
    """What finds the batch norms that are better ours though nothing is fused with them.

    Those that only our calls read, as residual or input: Inductor could not fuse them with those.
    And those whose statistics our calls update: torch's keep them for their backward, and would
    find them changed there.
    """
    updated: set[int] = set()
    for node in graph.nodes:
        if node.target in _OURS:
            updated |= _storages(node.kwargs.get(name) for name in _STATISTICS)

    def find(node: fx.Node) -> list[Fusion]:
        fusion = find_alone(node)
        if fusion is None:
            return []
        is_operand = node.users and all(user.target in _OURS for user in node.users)
        return [fusion] if is_operand or _statistics(fusion) & updated else []

    return find


def _can_move(fusion: Fusion) -> bool:
    """Whether the nodes can all be run where the last one is."""
    state = _statistics(fusion)
    read: set[int] = set()  # by those of the nodes that have been passed
    node = fusion.nodes[0]
    while node is not fusion.nodes[-1]:
        if node in fusion.nodes:
            read |= _storages(node.all_input_nodes)
        elif _disturbs(node, read, read & state):
            return False
        node = node.next
    if ACTIVATIONS[fusion.arguments.get("activation")].is_curved:
        # The backward takes the residual, where torch's takes a sum that nothing else can change.
        residual = _storages([fusion.arguments.get("residual")])
        while residual and node.next.op != "root":
            node = node.next
            if _may_change(node, residual):
                return False
    return True


def _disturbs(node: fx.Node, read: set[int], state: set[int]) -> bool:
    """Whether it matters if the node runs before or behind what reads these tensors.

    state: those that it updates as well, maybe.
    """
    if node.op in ("placeholder", "get_attr"):
        return False
    touched = _storages(node.all_input_nodes)
    if touched & state or node.meta.get("example_value") is None:
        return True  # without a value: the borders of no_grad and autocast, setitem
    return _may_change(node, read)


def _may_change(node: fx.Node, tensors: set[int]) -> bool:
    """Whether a node may change one of these, or give it another name."""
    touched = _storages(node.all_input_nodes) & tensors
    if not touched or node.target in _OURS:
        return False
    # What torch's own functions change they return; what others do is not known.
    is_torchs = node.op == "call_method" or _module(node.target) in ("torch", "_operator")
    is_op = isinstance(node.target, (OperatorBase, OpOverloadPacket))
    value = node.meta.get("example_value")  # setitem has none
    is_known = is_torchs and not is_op and value is not None
    return not is_known or bool(touched & _storages_of(pytree.tree_leaves(value)))


def _statistics(fusion: Fusion) -> set[int]:
    return _storages(fusion.arguments.get(name) for name in _STATISTICS)


def _module(function: Any) -> str:
    """The top-level package that a function is from."""
    return (getattr(function, "__module__", None) or "").partition(".")[0]


def _storages(nodes: Iterable[Any]) -> set[int]:
    values = (node.meta.get("example_value") for node in nodes if isinstance(node, fx.Node))
    return _storages_of(pytree.tree_leaves(list(values)))


def _storages_of(values: Iterable[Any]) -> set[int]:
    """Dynamo's fake tensors share storages as the true ones do."""
    return {value.untyped_storage()._cdata for value in values if is_plain(value)}
