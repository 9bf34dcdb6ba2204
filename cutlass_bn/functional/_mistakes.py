"""Errors for arguments that don't fit together, which name the wrong one. For use once one is.

Each raises RuntimeError, as torch does. Wrong is what differs from most of the others, and between
two the latter: so what a caller is likelier to have mistaken stands last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

Named = dict[str, Tensor]


def refuse_channels(vectors: Named, matrix: str, tensor: Tensor, dim: int) -> NoReturn:
    """Of vectors [C] and a tensor with C in this dim, called `matrix`: "weight", which is taken for
    the first of them, or "input", for the last."""
    of_matrix = {matrix: tensor.size(dim)}
    for name, vector in vectors.items():
        if vector.dim() != 1:
            expected, shape = of_matrix[matrix], list(vector.shape)
            raise RuntimeError(f"{name}: expected shape [{expected}], got {shape}")
    lengths = {name: vector.size(0) for name, vector in vectors.items()}
    lengths = {**lengths, **of_matrix} if matrix == "input" else {**of_matrix, **lengths}
    odd, like = _odd_one_out(lengths)
    if odd != matrix:
        shape = list(vectors[odd].shape)
        raise RuntimeError(f"{odd}: expected shape [{lengths[like]}] like {like}, got {shape}")
    shape, expected = list(tensor.shape), lengths[like]
    fitting = [*shape[:dim], expected, *shape[dim + 1 :]]
    raise RuntimeError(f"{matrix}: expected shape {fitting}, {expected} like {like}, got {shape}")


def refuse_device(tensors: Named) -> NoReturn:
    devices = {name: tensor.device for name, tensor in tensors.items()}
    odd, like = _odd_one_out(devices)
    expected, found = devices[like], devices[odd]
    raise RuntimeError(f"{odd}: expected a tensor on {expected} like {like}, got one on {found}")


def refuse_dtype(tensors: Named, used_dtype: Callable[[Tensor], torch.dtype]) -> NoReturn:
    """`used_dtype`: in which a tensor is taken (torch.autocast)."""
    odd, like = _odd_one_out({name: used_dtype(tensor) for name, tensor in tensors.items()})
    expected, found = tensors[like].dtype, tensors[odd].dtype
    raise RuntimeError(f"{odd}: expected {expected} like {like}, got {found}")


def _odd_one_out(values: dict[str, Any]) -> tuple[str, str]:
    """The name of the first value that isn't the most common one, and a name of that one."""
    common, _ = Counter(values.values()).most_common(1)[0]
    odd = next(name for name, value in values.items() if value != common)
    return odd, next(name for name, value in values.items() if value == common)
