"""The registered ops: Python entries, fake implementations, autograd formulas. Importing this loads the library."""

from . import _flops as _flops  # for what it registers
from . import batch_norm, fp32_products, linear_batch_norm

__all__ = ["batch_norm", "fp32_products", "linear_batch_norm"]
