"""nn.Sequential that runs neighbours in one: BatchNorm and activation; Linear, BatchNorm1d and
activation. What its children are is asked at each call, so that they may be replaced, hooked,
taken or called one by one at any time."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .. import functional
from ..modules import BatchNorm1d, SyncBatchNorm
from ..modules._fusible import NORMS, activation_of, is_fusible
from ..modules._group import group_of
from ..modules._subclass import PLAIN, why_not_plain
from ..modules.batch_norm import normalise
from ._classes import Fusing, base_of

_FORWARD, _ITER = nn.Sequential.forward, nn.Sequential.__iter__
_AFTER_LINEAR = (BatchNorm1d, SyncBatchNorm)


class Group(NamedTuple):
    """Neighbours that one call may stand for."""

    linear: nn.Module | None
    norm: Any
    activation: str | None
    width: int


def group_at(children: list[nn.Module], start: int) -> Group | None:
    """The longest group that starts with a certain child, or None."""
    at, linear = start, None
    if type(children[start]) is nn.Linear:
        linear, at = children[start], start + 1
        if at == len(children) or type(children[at]) not in _AFTER_LINEAR or not is_fusible(linear):
            return None
    norm: Any = children[at]
    if type(norm) not in NORMS or not is_fusible(norm) or not norm.is_bare():
        return None
    at += 1
    activation = activation_of(children[at]) if at < len(children) else None
    width = at - start + (activation is not None)
    return Group(linear, norm, activation, width) if width > 1 else None


def groups(container: nn.Module) -> list[tuple[int, Group]]:
    """All of a container, by the number of their first child."""
    children, found, at = list(container._modules.values()), [], 0
    while at < len(children):
        group = group_at(children, at)  # type: ignore[arg-type]
        if group is not None:
            found.append((at, group))
        at += 1 if group is None else group.width
    return found


def is_exact(container: nn.Module) -> bool:
    """Whether it calls its children one after the other, as nn.Sequential does."""
    base: Any = base_of(container)
    return (
        issubclass(base, nn.Sequential)
        and base.forward is _FORWARD
        and base.__iter__ is _ITER
        and "forward" not in container.__dict__
    )


class FusingSequential(Fusing):
    """An exact nn.Sequential that fuses."""

    @staticmethod
    def _fused_forward(base: Any) -> Any:
        @functools.wraps(base.forward)
        def forward(self: Any, input: Any) -> Any:
            if base.forward is not _FORWARD or _has_any_global_hook():
                return base.forward(self, input)
            children, at = list(self._modules.values()), 0
            while at < len(children):
                group = group_at(children, at) if type(input) is Tensor else None
                if group is None:
                    input, at = children[at](input), at + 1
                elif group.linear is None:
                    input = normalise(group.norm, input, None, group.activation)
                    at += group.width
                else:
                    arguments = _linear_arguments(group, input)
                    if arguments is None:
                        input, at = group.linear(input), at + 1
                    else:
                        input = functional.linear_batch_norm(*arguments[0], **arguments[1])
                        at += group.width
            return input

        return forward


def _linear_arguments(group: Group, input: Tensor) -> Any:
    """Of functional.linear_batch_norm, or None where the modules must run one by one."""
    assert group.linear is not None
    linear, affine, buffers = group.linear._parameters, group.norm._parameters, group.norm._buffers
    if input.dim() != 2:
        return None
    try:
        weights = linear["weight"], linear["bias"]
        gamma, beta = affine["weight"], affine["bias"]
        statistics = buffers["running_mean"], buffers["running_var"]
        counter = buffers["num_batches_tracked"]
    except KeyError:  # as in DataParallel's replicas
        return None
    for tensor in (*weights, *statistics, gamma, beta, counter):
        if type(tensor) not in PLAIN and why_not_plain(tensor):
            return None
    norm = group.norm
    training, tracked = norm.training, norm.track_running_stats
    if training and not tracked:
        statistics, counter = (None, None), None
    options = {"activation": group.activation, "num_batches_tracked": counter}
    if norm.is_synchronised and training:
        options["process_group"] = group_of(norm)
    vectors = (None, *statistics, gamma, beta)
    return (input, *weights, *vectors, training, norm.momentum, norm.eps), options
