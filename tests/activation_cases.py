"""What the tests of the ops with an activation and a residual share: inputs, calls of the ops that
give them no more than they need, and the same by torch."""

from __future__ import annotations

from dataclasses import dataclass

import oracle
import torch
import torch.nn.functional as F
from batch_norm_cases import Case
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-5
# In the order of the codes of csrc/common/activation.h.
ACTIVATIONS = {
    "none": lambda v: v,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
}
CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
RECTIFIERS = ("relu", "leaky_relu")
GRADIENTS = ("dx", "dresidual", "dweight", "dbias")
ops = torch.ops.cutlass_bn


@dataclass(frozen=True)
class Layout:
    sizes: tuple[int, ...]
    why: str
    channels_last: bool = False
    offset: int = 0

    def __str__(self) -> str:
        return self.why.replace(" ", "-")

    def dense(self, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
        case = Case(self.sizes, self.why, dtype, self.channels_last, offset=self.offset)
        return case.dense("cuda", mean, std)


def strides_of_output(x: Tensor) -> tuple[int, ...]:
    """As torch's: rows of channels are a memory format in ranks 4 and 5 alone."""
    return x.contiguous().stride() if x.dim() == 3 else x.stride()


LAYOUTS = [
    Layout((24, 6, 48, 52), "on chip, blocks that share a channel"),
    Layout((3, 300, 20, 20), "on chip, many channels"),
    Layout((3, 5, 17, 19), "planes that are no whole vectors"),
    Layout((5, 8, 24, 28), "planes at odd addresses", offset=1),
    Layout((6, 16, 7, 7), "small planes"),
    Layout((7, 5, 3, 3), "small planes that are no whole vectors"),
    Layout((4, 16, 15, 17), "small planes of odd size"),
    Layout((8, 64, 14, 14), "channels_last", channels_last=True),
    Layout((9, 200, 5, 5), "channels_last, more channels than a block", channels_last=True),
    Layout((4, 3, 19, 21), "channels_last of 3", channels_last=True),
    Layout((4, 32, 6, 6), "channels_last at odd addresses", channels_last=True, offset=3),
    Layout((300, 72), "matrix"),
    Layout((129, 37), "matrix of odd rows"),
    Layout((5, 24, 40), "sequences, channels adjacent", channels_last=True),
]
FEW_LAYOUTS = [LAYOUTS[i] for i in (0, 2, 4, 7, 9)]
TWO_PASSES = Layout((64, 2, 256, 256), "planes in two passes")


def poison(*tensors: Tensor) -> None:
    """Leaves NaN where outputs of these tensors' sizes are likely to be allocated."""
    oracle.poison("cuda", *(t.numel() * t.element_size() // 4 + 1 for t in tensors))


@dataclass
class Arguments:
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor  # running
    var: Tensor
    dy: Tensor
    activation: str
    training: bool

    @property
    def code(self) -> int:
        return CODES[self.activation]

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """y, and in training stats."""
        poison(self.x)
        affine = (self.weight, self.bias)
        if not self.training:
            running = (self.mean, self.var)
            return ops.batch_norm_inference(
                self.x, self.residual, *running, *affine, EPS, self.code
            ), None
        running = (self.mean.clone(), self.var.clone(), None)
        return ops.batch_norm_training(
            self.x, self.residual, *running, *affine, 0.1, EPS, self.code
        )

    def after(self, y: Tensor) -> Tensor | None:
        if self.residual is None or self.activation == "none":
            return None
        return y if self.activation in RECTIFIERS else self.residual

    def backward(self, y: Tensor, stats: Tensor | None, *wanted: str) -> dict[str, Tensor]:
        """The gradients that are wanted, given no more than they need."""
        saved = self.after(y)
        makes_v = self.activation != "none" and (saved is None or saved is not y)
        needs_x = "dweight" in wanted or makes_v or (self.training and "dx" in wanted)
        poison(self.x, self.x)
        before = (self.dy, self.x if needs_x else None)
        behind = (
            self.code, "dx" in wanted, "dresidual" in wanted,
            F32 if "dweight" in wanted else None, F32 if "dbias" in wanted else None,
        )  # fmt: skip
        bias = self.bias if makes_v else None
        if self.training:
            stats = stats if needs_x else None
            results = ops.batch_norm_backward(*before, stats, self.weight, bias, saved, *behind)
        else:
            mean = self.mean if needs_x else None
            var = self.var if needs_x or "dx" in wanted else None
            results = ops.batch_norm_inference_backward(
                *before, mean, var, self.weight, bias, saved, EPS, *behind
            )
        for name, result in zip(GRADIENTS, results, strict=True):
            assert name in wanted or result.numel() == 0
        return {n: r for n, r in zip(GRADIENTS, results, strict=True) if n in wanted}

    def gradients_of(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Of these, what the op can be asked for."""
        without = self.residual is None or self.activation == "none"
        return tuple(name for name in names if not (without and name == "dresidual"))

    def chain(self, dtype: torch.dtype, y: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """y and the gradients by torch. Given y, relu and leaky_relu pass on where y has passed:
        near 0 float64 may decide otherwise."""
        wide = dtype == torch.float64

        def cast(t: Tensor | None) -> Tensor | None:
            if t is None:
                return None
            return (t.double() if wide else t).detach().clone().requires_grad_()

        x, residual, weight, bias = map(cast, (self.x, self.residual, self.weight, self.bias))
        mean, var = (t.double() if wide else t.clone() for t in (self.mean, self.var))
        v = F.batch_norm(x, mean, var, weight, bias, self.training, 0.1, EPS)
        if residual is not None:
            v = v + residual
        if y is not None and self.activation in RECTIFIERS:
            slope = 0.0 if self.activation == "relu" else 0.01
            exact = v * torch.where(y > 0, 1.0, slope)
        else:
            exact = ACTIVATIONS[self.activation](v)
        leaves = {"dx": x, "dresidual": residual, "dweight": weight, "dbias": bias}
        leaves = {name: leaf for name, leaf in leaves.items() if leaf is not None}
        dy = self.dy.to(exact.dtype, copy=True)  # where cuDNN can take it: at an even address
        grads = torch.autograd.grad(exact, list(leaves.values()), dy)
        return exact.detach(), dict(zip(leaves, grads, strict=True))


def make(
    layout: Layout,
    dtype: torch.dtype,
    activation: str,
    with_residual: bool,
    training: bool,
    mean: float = 0.5,
    std: float = 1.5,
) -> Arguments:
    channels = layout.sizes[1]
    weight = torch.rand(channels, device="cuda") * 2 - 1  # of both signs
    weight[-1] = 0.0
    return Arguments(
        layout.dense(dtype, mean, std),
        layout.dense(dtype) if with_residual else None,
        weight,
        torch.randn(channels, device="cuda") * 0.3,
        torch.randn(channels, device="cuda") * 0.3 + mean,
        torch.rand(channels, device="cuda") * std**2 + 0.5,
        layout.dense(dtype, 0.2),
        activation,
        training,
    )
