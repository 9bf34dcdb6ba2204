"""The registered ops: Python entries, fake implementations and autograd formulas. Importing this loads the library if there is one."""

from . import batch_norm, linear_batch_norm

__all__ = ["batch_norm", "linear_batch_norm"]
