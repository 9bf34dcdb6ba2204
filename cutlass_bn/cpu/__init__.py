"""The ops of csrc/ops for CPU tensors: same arguments, results and changes, of PyTorch's kernels.

To be called eagerly, under no_grad or below autograd: the formulas in cutlass_bn/ops go around
them. y is as exact as cutlass_bn.reference makes it, in a fraction of the time.

Inputs are float32, float16, bfloat16 or float64, of any strides; vectors [C] of any of these. stats
is float32, but float64 of float64 inputs. y and the gradient of input have the strides that they
have in torch.nn. Running statistics and counter change last, so not where a call fails. momentum
None: a cumulative average over the counter; a ValueError without one. What is not asked for in a
backward comes as an empty tensor. Who calls has checked the shapes.
"""

from .batch_norm import (
    batch_norm_backward,
    batch_norm_inference,
    batch_norm_inference_backward,
    batch_norm_training,
)
from .linear_batch_norm import (
    linear_batch_norm_backward,
    linear_batch_norm_inference,
    linear_batch_norm_training,
)

__all__ = [
    "batch_norm_backward",
    "batch_norm_inference",
    "batch_norm_inference_backward",
    "batch_norm_training",
    "linear_batch_norm_backward",
    "linear_batch_norm_inference",
    "linear_batch_norm_training",
]
