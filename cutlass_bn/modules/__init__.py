"""Drop-in modules."""

from .batch_norm import BatchNorm2d
from .linear_batch_norm import LinearBatchNorm1d

__all__ = ["BatchNorm2d", "LinearBatchNorm1d"]
