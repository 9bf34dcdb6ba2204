"""What moments and transforms share: layouts, dtypes, and whether a mean lies near zero."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

Vector = Optional[Tensor]  # noqa: UP045 (evaluated, by Python 3.10 too)
Dtype = Optional[torch.dtype]  # noqa: UP045


def vector_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the vectors beside an input of `dtype`, and of its sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def converted(vector: Vector, dtype: torch.dtype) -> Any:
    """For PyTorch's kernels, which read some vectors as if they were contiguous."""
    if vector is None or (vector.dtype == dtype and vector.is_contiguous()):
        return vector
    return vector.to(dtype).contiguous()


def times(vector: Tensor, factor: Vector) -> Tensor:
    return vector if factor is None else vector * factor


def dense(x: Tensor) -> Tensor:
    """x, copied where it is not contiguous in the memory format that its strides suggest."""
    return x if x.is_contiguous() else x.contiguous(memory_format=suggest_memory_format(x))


def laid_out_like(tensor: Tensor, x: Tensor) -> Tensor:
    if tensor.stride() == x.stride():
        return tensor
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view([1, -1] + [1] * (x.dim() - 2))


def is_within(values: Tensor, bound: float) -> bool:
    """Whether all are, NaN aside: nothing is to be gained for such a channel."""
    low, high = _range(values, values)
    return low >= -bound and high <= bound


def lies_near(mean: Tensor, var: Tensor, deviations: float, eps: float = 0.0) -> bool:
    """Whether each mean is at most so many deviations away from zero, and no variance overflows.

    A variance that is NaN is that of values that aren't finite: such a channel has no say.
    """
    low, high = _range(torch.addcmul(var, mean, mean, value=-(deviations**-2)), var)
    return low >= -eps and high < float("inf")


def _range(values: Tensor, unless_nan: Tensor) -> tuple[float, float]:
    low, high = (bound.item() for bound in torch.aminmax(values))
    if low != low:
        low, high = (
            bound.item() for bound in torch.aminmax(values.masked_fill(unless_nan.isnan(), 0.0))
        )
    return low, high
