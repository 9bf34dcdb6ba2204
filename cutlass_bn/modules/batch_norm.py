"""BatchNorm2d, a drop-in for torch's."""

import torch
from torch import Tensor

from ..functional._batch_norm import batch_norm_with_counter


class BatchNorm2d(torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` on kernels of our own: the same constructor, parameters, buffers, state dict and errors.

    Shape:
        input [N, C, H, W], float32, float16 or bfloat16 (float64 runs as plain PyTorch); output the same, in the same
        memory format. Parameters and running statistics are float32, or follow `.half()` and `.bfloat16()`.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 4:
            self._check_input_dim(input)  # raises torch's error
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
