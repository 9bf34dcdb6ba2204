"""The products of float32 matrices: how they are made, and the op for those outside of the layers.

Schema and kernels are in csrc/ops.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _library, reference
from ._autograd import over_a_batch

# How float32 products are made (csrc/linear_bn/policy.h): as torch.mm does, in TF32, or of three
# fp16 products where those are faster.
FP32_PRODUCTS = {"ieee": 0, "tf32": 1, "split": 2}

if _library.library_is_loaded():
    # -> a @ b of float32 [M, K] and [K, N], contiguous. Not differentiable.
    fp32_matmul = torch.ops.cutlass_bn.fp32_matmul.default


def matmul(a: Tensor, b: Tensor, fp32_products: int) -> Tensor:
    """a @ b, as precise as the products of the forward."""
    if a.is_cuda and a.dtype == torch.float32:
        product: Tensor = fp32_matmul(a, b, fp32_products)
        return product
    return a @ b


def _fake_fp32_matmul(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    torch._check(a.dim() == 2 and b.dim() == 2, lambda: "a, b: expected 2 dimensions")
    torch._check(
        a.dtype == b.dtype == torch.float32,
        lambda: f"a, b: expected float32, got {a.dtype} and {b.dtype}",
    )
    expected, shape = f"[{a.size(1)}, N]", list(b.shape)
    torch._check(a.size(1) == b.size(0), lambda: f"b: expected shape {expected}, got {shape}")
    return a.new_empty((a.size(0), b.size(1)))


# An op, for the sake of flop counters: they don't look inside, and what a backward makes again is
# no work of the layer.
torch.library.define(
    "cutlass_bn::product_again",
    "(Tensor input, Tensor weight, Tensor? bias, int fp32_products) -> Tensor",
)
product_again = torch.ops.cutlass_bn.product_again.default


@torch.library.impl("cutlass_bn::product_again", "CompositeExplicitAutograd")
def _product_again(
    input: Tensor, weight: Tensor, bias: Tensor | None, fp32_products: int
) -> Tensor:
    """What the inference rounded: the product, in half precision with the bias."""
    if input.dtype in reference.HALVES:
        return F.linear(input, weight, bias)
    return matmul(input, weight.t(), fp32_products)


if _library.library_is_loaded():
    torch.library.register_fake("cutlass_bn::fp32_matmul", _fake_fp32_matmul)
    torch.library.register_vmap("cutlass_bn::fp32_matmul", over_a_batch(fp32_matmul))
