"""Batch normalisation as functions: plain arguments in, tensors out, running statistics updated in
place."""

from ._batch_norm import batch_norm
from ._linear_batch_norm import linear_batch_norm

__all__ = ["batch_norm", "linear_batch_norm"]
