"""BatchNorm2d, a drop-in for torch's."""

import torch
from torch import Tensor

from ..functional._batch_norm import batch_norm_with_counter
from ._leaf import Leaf
from ._subclass import PLAIN, why_not_plain


class BatchNorm2d(torch.nn.BatchNorm2d, Leaf):
    """`torch.nn.BatchNorm2d` on kernels of our own: the same constructor, parameters, buffers, state dict and errors.

    Shape:
        input [N, C, H, W], float32, float16 or bfloat16 (float64 runs as plain PyTorch); output the same, in the same
        memory format. Parameters and running statistics are float32, or follow `.half()` and `.bfloat16()`.

    Where the input, a parameter or a buffer is a tensor subclass that stands for other tensors
    (DTensor), torch's own forward runs. `cutlass_bn.explain(module, input)` says so.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 4:
            self._check_input_dim(input)  # raises torch's error
        if self.reason_for_torchs(input) is not None:
            return super().forward(input)
        # Which statistics are used and which are updated: as in torch.nn.modules.batchnorm._BatchNorm.forward.
        running_mean, running_var, counter = self.running_mean, self.running_var, None
        if self.training:
            batch_statistics = True
            if self.track_running_stats:
                counter = self.num_batches_tracked
            else:
                running_mean = running_var = None
        else:
            batch_statistics = running_mean is None and running_var is None
        momentum = self.momentum
        if momentum is None and counter is None:
            momentum = 0.0
        return batch_norm_with_counter(
            input,
            running_mean,
            running_var,
            self.weight,
            self.bias,
            batch_statistics,
            momentum,
            self.eps,
            counter,
        )

    def reason_for_torchs(self, input: Tensor) -> str | None:
        """Why torch's own forward runs, or None where our function does."""
        if type(input) is not Tensor and (subclass := why_not_plain(input)):
            return f"the input is {subclass}"
        for tensors in (self._parameters, self._buffers):
            for name, tensor in tensors.items():
                if type(tensor) not in PLAIN and (subclass := why_not_plain(tensor)):
                    return f"{name} is {subclass}"
        return None
