"""BatchNormAct2d, a subclass of timm's: importing this file imports timm."""

from __future__ import annotations

from timm.layers import activations, create_norm_act, norm_act
from timm.layers._fx import register_notrace_module
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from ._fusible import ACTIVATION_OF, NORMS, activation_of, is_identity
from ._group import InGroup
from ._leaf import Leaf
from .batch_norm import ActivatedBatchNorm, normalise

ACTIVATION_OF[activations.GELU] = lambda module: "gelu"


@register_notrace_module
class BatchNormAct2d(norm_act.BatchNormAct2d, InGroup, Leaf):
    """timm's BatchNormAct2d, act(drop(BatchNorm2d(input))), on kernels of our own: timm's
    constructor, attributes and state dict, and known to timm, as `norm_layer` too.

    Its attribute process_group, which `convert_sync_batchnorm` sets, is None for local statistics.
    ReLU, LeakyReLU (slope 0.01), SiLU and GELU (the erf form) are fused where there is no drop;
    other layers run after the normalisation, as in timm.

    Shape:
        input [N, C, H, W], float32, float16 or bfloat16 (float64 runs as plain PyTorch); output the
        same, in the same memory format.

    Raises:
        ValueError: as torch.nn.BatchNorm2d.
    """

    @property
    def is_synchronised(self) -> bool:
        return self._kept_group is not None

    def forward(self, x: Tensor) -> Tensor:
        drop, act = self.drop, self.act
        if is_identity(drop) and not _has_any_global_hook():
            if is_identity(act):
                return normalise(self, x, None, None)
            if (activation := activation_of(act)) is not None:
                return normalise(self, x, None, activation)
        return act(drop(normalise(self, x, None, None)))

    def is_bare(self) -> bool:
        """Whether nothing follows the normalisation, so that something else may be fused to it."""
        return is_identity(self.drop) and is_identity(self.act)

    reason_for_torchs = ActivatedBatchNorm.reason_for_torchs


NORMS.add(BatchNormAct2d)
# By class, as timm looks up what it was given as norm_layer; names stay timm's own.
create_norm_act._NORM_ACT_TYPES.add(BatchNormAct2d)
create_norm_act._NORM_ACT_REQUIRES_ARG.add(BatchNormAct2d)
