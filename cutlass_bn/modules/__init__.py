"""Drop-in modules."""

from .batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from .linear_batch_norm import LinearBatchNorm1d
from .sync_batch_norm import SyncBatchNorm

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LinearBatchNorm1d", "SyncBatchNorm"]
