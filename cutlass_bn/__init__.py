"""Batch normalisation for PyTorch, fast and exact: with what follows it, and after Linear."""

from typing import Any

from . import functional
from ._explain import Plan, Report, explain
from ._library import build_info, library_is_loaded
from ._version import __version__
from .convert import convert, convert_sync_batchnorm, revert
from .modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, LinearBatchNorm1d, SyncBatchNorm

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LinearBatchNorm1d",
    "Plan",
    "Report",
    "SyncBatchNorm",
    "__version__",
    "build_info",
    "convert",
    "convert_sync_batchnorm",
    "explain",
    "functional",
    "library_is_loaded",
    "revert",
]


def __getattr__(name: str) -> Any:
    if name == "BatchNormAct2d":  # made when it is first asked for, as it needs timm
        from .modules.batch_norm_act import BatchNormAct2d

        globals()[name] = BatchNormAct2d
        return BatchNormAct2d
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
