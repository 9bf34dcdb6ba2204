"""Our modules and fused calls put into a model that was built of torch's, and taken out again."""

from ._convert import convert, revert
from ._sync import convert_sync_batchnorm

__all__ = ["convert", "convert_sync_batchnorm", "revert"]
