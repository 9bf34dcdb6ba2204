"""convert_sync_batchnorm."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from ..functional._collectives import check_group
from ..modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, LinearBatchNorm1d, SyncBatchNorm
from ._classes import Fusing
from ._modules import become_ours, names_of, refuse_wrapped, why_left_alone

M = TypeVar("M", bound=nn.Module)

_CONVERTED = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm),
)


def convert_sync_batchnorm(module: M, process_group: Any = None) -> M:
    """Makes a model's BatchNorm1d, 2d, 3d and SyncBatchNorm, torch's and ours, `SyncBatchNorm` of
    ours, in place, and returns it; so it does those in a LinearBatchNorm1d, which stays fused.

    All modules stay the same objects with the same parameters, buffers, flags and state dict;
    activations and fusions stay. To convert twice changes nothing more. `revert` gives
    torch.nn.SyncBatchNorm. Unlike torch's, it is called on the model as it is on each rank, before
    DistributedDataParallel wraps it, on the CPU as well.

    Left alone are InstanceNorm, modules that are hooked, parametrised, pruned, lazy, patched or
    TorchScript, unknown subclasses (timm's among them, which has a conversion of its own), and what
    convert's filter_fn refused: `cutlass_bn.explain(model)` says so, and of the others that they
    are synchronised.

    Args:
        module: any module, of any dtype and on any device; also a BatchNorm itself.
        process_group: as SyncBatchNorm's. None: the group that a module has already, else the
            world.

    Returns:
        module.

    Raises:
        TypeError: process_group is no group; a model that is wrapped already, as in `convert`.
    """
    refuse_wrapped(module, "convert")
    check_group(process_group)
    names = names_of(module)
    norms: list[Any] = [m.bn if isinstance(m, LinearBatchNorm1d) else m for m in names]
    for norm in norms:
        # Also where it has several names: all calls of it are synchronised.
        if type(norm) not in _CONVERTED or why_left_alone(norm, [""]) is not None:
            continue
        if type(norm) is not SyncBatchNorm:
            become_ours(norm, SyncBatchNorm)
        if process_group is not None:
            norm.process_group = process_group
    for container in names:
        if isinstance(container, Fusing):
            container._make_fusing_plan()
    return module


def _of_class(cls: type, module: M, process_group: Any = None) -> M:
    return convert_sync_batchnorm(module, process_group)


_of_class.__doc__ = convert_sync_batchnorm.__doc__
SyncBatchNorm.convert_sync_batchnorm = classmethod(_of_class)  # type: ignore[assignment]
