"""The problems that are measured: shapes, precisions and modes, and the least work of each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

BN2D, GEMM_SCALE_BN = "bn2d", "gemm_scale_bn"
TRAIN, EVAL, STEP = "train", "eval", "step"  # two forwards; forward and backward of training
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"fp32": FP32, "tf32": FP32, "bf16": BF16, "fp16": FP16}


@dataclass(frozen=True)
class Options:
    """How a run measures."""

    device: torch.device
    quick: bool = False
    compile: bool = True
    seconds: float | None = None  # of timing a case; None: 1.5, quick 0.5, on the CPU 0.2
    only: str = ""  # part of a case's name
    seed: int = 0  # of the accuracy suite's inputs
    ceilings: dict[str, float] = field(default_factory=dict)  # of the hardware

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def timing_seconds(self) -> float:
        return self.seconds or (0.2 if not self.on_gpu else 0.5 if self.quick else 1.5)


@dataclass(frozen=True)
class Case:
    """One problem. shape is (N, C, H, W) of bn2d and (M, K, N) of gemm_scale_bn."""

    kind: str
    shape: tuple[int, ...]
    precision: str = "fp32"
    mode: str = TRAIN
    channels_last: bool = False
    compile: bool = True  # whether torch.compile is a peer (it costs seconds)
    activation: str | None = None  # of a bn2d, as the next: activation(bn2d(x) + residual)
    residual: bool = False

    @property
    def name(self) -> str:
        if self.kind == BN2D:
            size = "x".join(map(str, self.shape)) + " channels_last" * self.channels_last
        else:
            size = "{}x{}->{}".format(*self.shape)
        what = "+".join(filter(None, (self.kind, "add" * self.residual, self.activation)))
        name = f"{what} {size} {self.precision}"
        return f"step {name}" if self.mode == STEP else f"{name} {self.mode}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.shape if self.kind == BN2D else self.shape[:2]

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.shape if self.kind == BN2D else (self.shape[0], self.shape[2])

    @property
    def passes(self) -> float:
        """The least work, in copies of the tensor (bn2d) or matrix products (gemm_scale_bn)."""
        if self.mode != STEP:
            return 1.0
        # A bn2d step reads x and writes y, reads x and dy and writes dx; a copy is two of the five.
        # A residual is read, and its gradient written.
        return 2.5 + self.residual if self.kind == BN2D else 3.0

    @property
    def work(self) -> tuple[float, str]:
        """The least work in bytes or floating-point operations, and the unit of its rate."""
        size = 2.0 * self.passes * math.prod(self.shape)
        return (size * self.dtype.itemsize, "GB/s") if self.kind == BN2D else (size, "TFLOP/s")

    def reduced(self) -> Case:
        """The same case at a size that a CPU finishes at once."""
        divisors = (16, 4, 8, 8) if self.kind == BN2D else (32, 16, 16)
        sizes = zip(self.shape, divisors, strict=True)
        return replace(self, shape=tuple(max(size // by, 7) for size, by in sizes))


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """PyTorch's own switch between fp32 and TF32 products, set for a case and put back after it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


BN2D_LARGE = (64, 64, 512, 512)
GEMM_LARGE = (16384, 4096, 4096)
# From images to late ResNet layers.
IMAGES = ((16, 64, 256, 256), "fp32")
LAYERS = ((64, 256, 56, 56), "fp32"), ((128, 512, 28, 28), "bf16")
# Channels and size where a ReLU, or an addition and a ReLU, follows in ResNet-50.
RESNET = (64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7)
# Where fp32 on tensor cores has to pay beside the large problem: a short K, few rows.
GEMM_FP32_OTHERS = (16384, 1024, 4096), (16384, 512, 4096), (1024, 8192, 8192)


def _bn2d(*shapes: tuple[tuple[int, ...], str], mode: str = TRAIN) -> list[Case]:
    """In both memory formats."""
    return [Case(BN2D, *shape, mode, last) for shape in shapes for last in (False, True)]


def _gemm(precisions: str, *depths: int, mode: str = TRAIN) -> list[Case]:
    shapes = [(GEMM_LARGE[0], k, GEMM_LARGE[2]) for k in depths]
    return [Case(GEMM_SCALE_BN, s, p, mode) for p in precisions.split() for s in shapes]


def workloads(quick: bool) -> list[Case]:
    """The two problems that this library is made for."""
    gemm, bn2d = ("fp32 tf32 bf16", "fp32") if quick else ("fp32 tf32 bf16 fp16", "fp32 bf16 fp16")
    found = [Case(GEMM_SCALE_BN, GEMM_LARGE, precision) for precision in gemm.split()]
    found += [Case(BN2D, BN2D_LARGE, precision) for precision in bn2d.split()]
    # Quick: no compilation in eval, where the GEMM alone and a copy are the peers that matter.
    pairs = ((case, replace(case, mode=EVAL, compile=not quick)) for case in found)
    others = [Case(GEMM_SCALE_BN, shape) for shape in GEMM_FP32_OTHERS if not quick]
    return [*chain.from_iterable(pairs), *others]


def steps(quick: bool) -> list[Case]:
    if quick:
        return [*_gemm("fp32 bf16", 4096, mode=STEP), *_bn2d(IMAGES, LAYERS[1], mode=STEP)[::2]]
    large = Case(BN2D, BN2D_LARGE, mode=STEP)
    gemm = _gemm("fp32 tf32 bf16", 4096, mode=STEP) + _gemm("bf16", 1024, mode=STEP)
    return [*gemm, large, *_bn2d(IMAGES, *LAYERS, mode=STEP)]


def layers(quick: bool) -> list[Case]:
    """Steps of a BatchNorm2d and of what follows it in ResNet-50."""
    shapes = [((256, c, size, size), "bf16", STEP, True) for c, size in RESNET]
    shapes.append(((128, 256, 56, 56), "fp32", STEP, False))
    relus = [Case(BN2D, *shape, activation="relu") for shape in shapes[: 1 if quick else None]]
    return [replace(case, residual=residual) for case in relus for residual in (False, True)]


def sweep(quick: bool) -> list[Case]:
    """What fusion gains as K falls; BatchNorm2d over shapes."""
    if quick:
        return _gemm("bf16", 256, 1024, 4096) + _bn2d(IMAGES, *LAYERS)
    gemm = _gemm("fp32 tf32 bf16", 256, 512, 1024, 2048, 4096)
    return gemm + _bn2d((BN2D_LARGE, "fp32"), IMAGES, *LAYERS)


def _every_mode(*cases: Case) -> list[Case]:
    return [replace(case, mode=mode) for case in cases for mode in (TRAIN, EVAL, STEP)]


def overhead(quick: bool) -> list[Case]:
    """So small that the host's time is all."""
    return _every_mode(Case(BN2D, (8, 16, 8, 8)), Case(GEMM_SCALE_BN, (64, 32, 32)))


def cpu(quick: bool) -> list[Case]:
    """For the CPU path: a ResNet layer in both memory formats, a hidden layer of an MLP."""
    return _every_mode(*_bn2d(((16, 64, 56, 56), "fp32")), Case(GEMM_SCALE_BN, (2048, 1024, 1024)))
