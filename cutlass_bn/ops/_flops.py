"""What `torch.utils.flop_counter.FlopCounterMode` counts of our ops: what it counts of F.linear.

2 M N K for a matrix product, however it is made: the three fp16 products that emulate a float32 one
are one. The rest counts nothing, as batch norms and activations do in torch. Products that torch
makes for us inside an op are not seen, and those of the backwards outside of them are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .._library import library_is_loaded

Shape = Sequence[int]


def linear_flops(input: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    """Of input [M, K] times the transpose of weight [N, K]."""
    return 2 * input[0] * input[1] * weight[0]


def matmul_flops(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """Of a [M, K] times b [K, N]."""
    return 2 * a[0] * a[1] * b[1]


def backward_flops(
    grad: Shape, input: Shape, weight: Shape, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Of the products for the gradients of input and weight that came back."""
    products = sum(len(shape) == 2 for shape in out_shape[:2])
    return products * linear_flops(input, weight)


def _register() -> None:
    ops = torch.ops.cutlass_bn
    for formula, packets in (
        (linear_flops, (ops.linear_batch_norm_training, ops.linear_batch_norm_inference)),
        (backward_flops, (ops.linear_batch_norm_backward,)),
        (matmul_flops, (ops.fp32_matmul,)),
    ):
        register_flop_formula(list(packets))(formula)


if library_is_loaded():
    _register()
