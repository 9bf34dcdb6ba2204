"""Our modules and fused calls put into a model that was built of torch's, and taken out again."""

from ._convert import convert, revert

__all__ = ["convert", "revert"]
