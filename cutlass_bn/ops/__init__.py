"""The registered ops: Python entries, fake implementations, autograd formulas. Importing this loads
the library."""

from . import _flops as _flops  # for what it registers
from . import batch_norm, linear_batch_norm, product

__all__ = ["batch_norm", "linear_batch_norm", "product"]
