"""torchvision and timm beside any build of torch: import them from here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

# What torchvision's import wants to be defined. The models need none of it.
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
)


def has_compiled_operators() -> bool:
    """Whether torchvision's were built for this build of torch."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    try:
        torch.ops.load_library(next(Path(spec.origin).parent.glob("_C*.so")))
    except (OSError, StopIteration):
        return False
    return True


if not has_compiled_operators():
    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(operator)

import timm  # noqa: E402
import torchvision  # noqa: E402

__all__ = ["timm", "torchvision"]
