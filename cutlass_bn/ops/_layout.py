"""Memory formats: what torch's batch norm makes of its input's, and what our kernels take."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_format(input: Tensor) -> torch.memory_format:
    """That of torch's output: at::Tensor::suggest_memory_format."""
    dims = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(input.dim())
    if dims is None or input.stride(1) == 0:
        return torch.contiguous_format
    least = 0
    for dim in dims:
        size, stride = input.size(dim), input.stride(dim)
        # The last condition: of sizes of 1 alone, whose strides say nothing.
        if size == 0 or stride < least or (dim == 0 and least == input.stride(1)):
            return torch.contiguous_format
        least = stride * size
    return torch.channels_last if input.dim() == 4 else torch.channels_last_3d


def is_channels_last(input: Tensor) -> bool:
    """Whether the kernels take an input that is not contiguous, or its dense copy, as such."""
    return memory_format(input) != torch.contiguous_format


def is_dense(input: Tensor) -> bool:
    """Whether the kernels take input as it lies, and not a copy."""
    return input.is_contiguous() or input.is_contiguous(memory_format=memory_format(input))


def dense(input: Tensor) -> Tensor:
    """input itself where the kernels take it, else a copy as torch's output would lie."""
    return input.contiguous(memory_format=memory_format(input))
