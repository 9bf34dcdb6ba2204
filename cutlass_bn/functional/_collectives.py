"""Process groups, and the two collectives that synchronised statistics take.

A group is what users have of one: a ProcessGroup, a DeviceMesh of one dimension, a group's name,
or "world". It is looked up at each call, so that a model may be built, copied or loaded before its
groups exist. The collectives are functional, of the same kind in eager mode and in graphs, and
nothing waits on the host for them where the backend doesn't.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

WORLD = "world"


class Group(NamedTuple):
    """A process group of two or more, as the functional collectives take it."""

    name: str
    size: int


def check_group(process_group: Any) -> None:
    """TypeError for what can't be a group."""
    if process_group is None or isinstance(process_group, str):
        return
    if dist.is_available() and (
        isinstance(process_group, dist.ProcessGroup)
        or process_group is dist.GroupMember.NON_GROUP_MEMBER
        or isinstance(process_group, dist.device_mesh.DeviceMesh)
    ):
        return
    raise TypeError(
        'process_group: expected None, "world", a ProcessGroup, a DeviceMesh or the name of a '
        f"group, got {type(process_group).__name__}"
    )


def resolve(process_group: Any) -> Group | None:
    """The group, or None where there is nobody to synchronise with: it has one process, this
    process is not in it, or torch.distributed is not initialised."""
    if process_group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    if isinstance(process_group, str):
        name, size = _named(process_group)
    else:
        if isinstance(process_group, dist.device_mesh.DeviceMesh):
            process_group = process_group.get_group()
        size = dist.get_world_size(process_group)
        name = process_group.group_name if size > 1 else ""
    return Group(name, size) if size > 1 else None


def process_group_of(name: str) -> Any:
    """The ProcessGroup of that name, or of the world."""
    if name == WORLD:
        return dist.group.WORLD
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def torchs_group(process_group: Any) -> Any:
    """As torch.nn.SyncBatchNorm takes it: a ProcessGroup, or None for the world."""
    if isinstance(process_group, str):
        return None if process_group == WORLD else process_group_of(process_group)
    if dist.is_available() and isinstance(process_group, dist.device_mesh.DeviceMesh):
        return process_group.get_group()
    return process_group


@torch.compiler.assume_constant_result  # dynamo can't look into the registry of names
def _named(name: str) -> tuple[str, int]:
    group = process_group_of(name)
    return group.group_name, dist.get_world_size(group)


def name_of(process_group: Any) -> Any:
    """What stands for a group in another process: its name, where it has one."""
    if process_group is None or isinstance(process_group, str) or not dist.is_available():
        return process_group
    if isinstance(process_group, dist.device_mesh.DeviceMesh):
        process_group = process_group.get_group()
    if not isinstance(process_group, dist.ProcessGroup):
        return process_group
    if dist.is_initialized() and process_group is dist.group.WORLD:
        return WORLD
    return process_group.group_name


def all_gather(vector: Tensor, group: Group) -> Tensor:
    """[n] -> [size, n], in the order of ranks."""
    ops = torch.ops._c10d_functional
    gathered = ops.all_gather_into_tensor(vector.contiguous(), group.size, group.name)
    found: Tensor = ops.wait_tensor(gathered).view(group.size, -1)
    return found


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """The sum over the group."""
    ops = torch.ops._c10d_functional
    found: Tensor = ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", group.name))
    return found
