"""Batch normalisation for PyTorch on GPUs, fast and exact: Linear + BatchNorm1d fused, and BatchNorm2d."""

from . import functional
from ._explain import Plan, explain
from ._library import build_info, library_is_loaded
from ._version import __version__
from .modules import BatchNorm2d, LinearBatchNorm1d

__all__ = [
    "BatchNorm2d",
    "LinearBatchNorm1d",
    "Plan",
    "__version__",
    "build_info",
    "explain",
    "functional",
    "library_is_loaded",
]
