"""What tests of the Linear + BatchNorm1d layer share: cases, inputs, oracle, PyTorch's own way."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cutlass_bn import functional

ACTIVATIONS = {
    None: lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
}
EPS = 1e-5
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    why: str
    dtype: torch.dtype = torch.float32
    bias: bool = True
    scale: bool = True
    affine: bool = True
    activation: str | None = None
    parameter_dtype: torch.dtype = torch.float32  # of scale, gamma, beta and the running statistics
    tf32: bool = False

    def __str__(self) -> str:
        parts = [f"{self.m}x{self.k}x{self.n}", str(self.dtype).removeprefix("torch.")]
        parts += [name for name in ("bias", "scale", "affine", "tf32") if getattr(self, name)]
        if self.parameter_dtype != torch.float32:
            parts.append(f"parameters-{str(self.parameter_dtype).removeprefix('torch.')}")
        return "-".join([*parts, self.activation or "linear"])


BF16, FP16 = torch.bfloat16, torch.float16

CASES = [
    Case(2, 8, 8, "the smallest batch that has a variance"),
    Case(
        3, 1, 1, "one input feature, one channel: scalar access everywhere", bias=False, scale=False
    ),
    Case(5, 3, 7, "nothing divides the vector width", activation="relu"),
    Case(64, 128, 64, "one whole small tile", tf32=True),
    Case(65, 129, 68, "one row and one column more than a tile", tf32=True, activation="silu"),
    Case(300, 256, 32, "a large tile and a tail of 44 rows", tf32=True, scale=False),
    Case(257, 100, 36, "fp32 rows of 16 bytes, N no multiple of the tile", tf32=True, affine=False),
    Case(31, 33, 25, "K * 4 bytes is no multiple of 16: TMA can't", tf32=True, bias=False),
    Case(256, 384, 128, "several column tiles", activation="gelu"),
    Case(1000, 40, 16, "many row steps of a narrow block", activation="leaky_relu"),
    Case(130, 264, 72, "bf16, tails in every direction", BF16, tf32=False, activation="relu"),
    Case(256, 128, 64, "bf16, whole tiles, result promoted by an fp32 scale", BF16),
    Case(256, 128, 64, "bf16, whole tiles, bf16 result", BF16, scale=False, activation="gelu"),
    Case(
        129,
        72,
        40,
        "bf16 module cast by .bfloat16()",
        BF16,
        parameter_dtype=BF16,
        activation="silu",
    ),
    Case(77, 35, 24, "bf16, odd N: padded rows of u, scalar normalise", BF16, scale=False),
    Case(77, 35, 25, "bf16, odd K and N: portable", BF16, scale=False, affine=False),
    Case(200, 136, 64, "fp16, fp32 parameters", FP16, scale=False, activation="relu"),
    Case(200, 136, 64, "fp16 module cast by .half()", FP16, parameter_dtype=FP16),
    Case(2, 1030, 8, "more columns than a block of threads is wide, two rows"),
]


@dataclass
class Layer:
    """Inputs of functional.linear_batch_norm. Tensors that are absent are None."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    activation: str | None = None
    num_batches_tracked: Tensor | None = None

    NAMES = ("input", "weight", "bias", "scale", "gamma", "beta")  # what can have a gradient

    def arguments(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def differentiable(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.NAMES if getattr(self, name) is not None}

    def map(self, function) -> Layer:
        """Of function(tensor) for each tensor; leaves stay leaves where function detaches."""
        changed = {
            k: function(v)
            for k, v in self.arguments().items()
            if isinstance(v, Tensor) and k != "num_batches_tracked"
        }
        counter = None if self.num_batches_tracked is None else self.num_batches_tracked.clone()
        return replace(self, **changed, num_batches_tracked=counter)

    def clone(self) -> Layer:
        return self.map(lambda t: t.detach().clone())

    def double(self) -> Layer:
        return self.map(lambda t: t.detach().double())

    def requires_grad(self) -> Layer:
        for tensor in self.differentiable().values():
            tensor.requires_grad_()
        return self


def make_layer(case: Case, device: str, seed: int = 0) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).to(dtype).to(device)

    n, p = case.n, case.parameter_dtype
    return Layer(
        input=normal(case.m, case.k, dtype=case.dtype, mean=0.5),
        weight=normal(n, case.k, dtype=case.dtype, std=case.k**-0.5),
        bias=normal(n, dtype=case.dtype) if case.bias else None,
        scale=normal(n, dtype=p) if case.scale else None,
        running_mean=normal(n, dtype=p, std=0.1),
        running_var=normal(n, dtype=p).abs() + 0.5,
        gamma=normal(n, dtype=p, mean=1.0, std=0.3) if case.affine else None,
        beta=normal(n, dtype=p) if case.affine else None,
        activation=case.activation,
        num_batches_tracked=torch.zeros((), dtype=torch.int64, device=device),
    )


@contextmanager
def fp32_precision(tf32: bool):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def fused(layer: Layer, training: bool, **options) -> Tensor:
    return functional.linear_batch_norm(**layer.arguments(), training=training, eps=EPS, **options)


def unfused(layer: Layer, training: bool, momentum: float = 0.1, eps: float = EPS) -> Tensor:
    """PyTorch's own operations, in the layer's dtype, on its device. Updates running statistics."""
    z = F.linear(layer.input, layer.weight, layer.bias)
    z = z if layer.scale is None else z * layer.scale
    y = F.batch_norm(
        z, layer.running_mean, layer.running_var, layer.gamma, layer.beta, training, momentum, eps
    )
    return ACTIVATIONS[layer.activation](y)


def gradients(function, layer: Layer, training: bool, dy: Tensor, **options) -> dict[str, Tensor]:
    """Of every input that is there, by name. function: fused or unfused."""
    leaves = layer.differentiable()
    y = function(layer.requires_grad(), training, **options)
    found = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return dict(zip(leaves, found, strict=True))


def oracle(
    layer: Layer, training: bool, momentum: float = 0.1, eps: float = EPS
) -> tuple[Tensor, Layer]:
    """The float64 result, and the float64 layer with its running statistics after the call."""
    wide = layer.double()
    return unfused(wide, training, momentum, eps), wide


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Relative to the largest expected magnitude. NaN or infinite where only one side is."""
    if expected.numel() == 0:
        return 0.0
    error = (actual.double() - expected.double()).abs().max().item()
    return error / max(expected.abs().max().item(), 1e-30)


def assert_no_worse(
    actual: Tensor,
    peer: Tensor,
    expected: Tensor,
    factor: float = 2.0,
    floor: float = 1e-6,
    what: str = "",
) -> None:
    """Error against float64 at most `factor` times that of PyTorch's operations in its dtype."""
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    ours, theirs = max_error(actual, expected), max_error(peer, expected)
    assert ours <= factor * theirs + floor, f"{what}: error {ours:.3g}, PyTorch's {theirs:.3g}"
