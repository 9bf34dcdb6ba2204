"""What a module keeps of the process group that it takes statistics of."""

from __future__ import annotations

from typing import Any

from ..functional._collectives import WORLD, check_group, name_of, resolve


class Kept:
    """A group in a module: copies share it, and pickle stores its name."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (name_of(self.group),)


class InGroup:
    """A mixin: the attribute process_group."""

    _kept_group: Kept | None = None

    @property
    def process_group(self) -> Any:
        return None if self._kept_group is None else self._kept_group.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        check_group(group)
        self.__dict__["_kept_group"] = None if group is None else Kept(group)


def group_of(norm: Any) -> Any:
    """What functions take for the group of a norm, torch's or ours, that synchronises."""
    group = norm.process_group
    return WORLD if group is None else group


def synchronised_over(process_group: Any) -> str:
    """In words, of a group that functions take."""
    group = resolve(process_group)
    return f"synchronised over {1 if group is None else group.size} ranks"


def refuse_subclass(process_group: Any, subclass: str) -> None:
    """For torch's own forward, which would take local statistics."""
    if resolve(process_group) is not None:
        raise NotImplementedError(f"SyncBatchNorm takes plain tensors, got {subclass}")
