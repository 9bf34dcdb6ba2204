"""The registered ops: Python entries, fake implementations, autograd formulas. Importing this loads the library."""

from . import batch_norm, linear_batch_norm

__all__ = ["batch_norm", "linear_batch_norm"]
