"""The problems that are measured: shapes, precisions and modes, and the least work that each of them takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

BN2D = "bn2d"
GEMM_SCALE_BN = "gemm_scale_bn"

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One problem. shape is (N, C, H, W) for bn2d and (M, K, N) for gemm_scale_bn."""

    kind: str
    shape: tuple[int, ...]
    precision: str = "fp32"
    training: bool = True
    channels_last: bool = False
    compile: bool = True  # whether torch.compile is a peer (it costs seconds)

    @property
    def name(self) -> str:
        if self.kind == BN2D:
            size = "x".join(map(str, self.shape)) + (" channels_last" if self.channels_last else "")
        else:
            m, k, n = self.shape
            size = f"{m}x{k}->{n}"
        return f"{self.kind} {size} {self.precision} {'train' if self.training else 'eval'}"

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
    def work(self) -> tuple[float, str]:
        """What no implementation can avoid, and its rate's unit: bytes read and written once, or products and sums."""
        size = 1.0
        for extent in self.shape:
            size *= extent
        return (2 * size * self.dtype.itemsize, "GB/s") if self.kind == BN2D else (2 * size, "TFLOP/s")

    def reduced(self) -> Case:
        """The same case at a size that a CPU finishes at once."""
        if self.kind == BN2D:
            n, c, h, w = self.shape
            return replace(self, shape=(max(n // 16, 2), max(c // 4, 8), max(h // 8, 7), max(w // 8, 7)))
        m, k, n = self.shape
        return replace(self, shape=(max(m // 32, 64), max(k // 16, 16), max(n // 16, 16)))


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
# Where fp32 on tensor cores has to pay beside the large problem: a short K, few rows of a wide layer.
GEMM_FP32_OTHERS = ((16384, 1024, 4096), (16384, 512, 4096), (1024, 8192, 8192))


def workloads(quick: bool = False) -> list[Case]:
    """The two problems that this library is judged on, fp32 products first."""
    bn_precisions = ["fp32"] if quick else ["fp32", "bf16", "fp16"]
    gemm_precisions = ["fp32", "tf32", "bf16"] + ([] if quick else ["fp16"])
    modes = [True, False]
    # Quick: no compilation in eval, where the GEMM alone and a copy are the peers that matter.
    judged = [
        Case(kind, shape, precision, training, compile=training or not quick)
        for kind, shape, precisions in ((GEMM_SCALE_BN, GEMM_LARGE, gemm_precisions), (BN2D, BN2D_LARGE, bn_precisions))
        for precision in precisions
        for training in modes
    ]
    others = [] if quick else [Case(GEMM_SCALE_BN, shape) for shape in GEMM_FP32_OTHERS]
    return [*judged[: len(modes)], *others, *judged[len(modes) :]]


def steps(quick: bool = False) -> list[Case]:
    """Training steps, forward and backward."""
    gemm = [Case(GEMM_SCALE_BN, GEMM_LARGE, precision) for precision in ("fp32", "tf32", "bf16")]
    if quick:
        return [gemm[0], gemm[2], Case(BN2D, (16, 64, 256, 256)), Case(BN2D, (128, 512, 28, 28), "bf16")]
    shapes = (((64, 256, 56, 56), "fp32"), ((128, 512, 28, 28), "bf16"))
    return [
        *gemm,
        Case(GEMM_SCALE_BN, (16384, 1024, 4096), "bf16"),
        Case(BN2D, BN2D_LARGE),
        Case(BN2D, (16, 64, 256, 256)),
        *(Case(BN2D, shape, precision, channels_last=last) for shape, precision in shapes for last in (False, True)),
    ]


def sweep(quick: bool = False) -> list[Case]:
    """What fusion gains as K falls; BatchNorm2d from large images to late ResNet layers, in both memory formats."""
    depths = [256, 1024, 4096] if quick else [256, 512, 1024, 2048, 4096]
    gemm = [
        Case(GEMM_SCALE_BN, (16384, k, 4096), precision)
        for precision in (["bf16"] if quick else ["fp32", "tf32", "bf16"])
        for k in depths
    ]
    shapes = [((16, 64, 256, 256), "fp32"), ((64, 256, 56, 56), "fp32"), ((128, 512, 28, 28), "bf16")]
    if not quick:
        shapes.insert(0, (BN2D_LARGE, "fp32"))
    return gemm + [
        Case(BN2D, shape, precision, channels_last=last) for shape, precision in shapes for last in (False, True)
    ]


def kernels(quick: bool = False) -> list[Case]:
    """The calls whose kernels are timed one by one."""
    depths = [4096] if quick else [256, 1024, 4096]
    gemm = [Case(GEMM_SCALE_BN, (16384, k, 4096), precision) for precision in ("fp32", "tf32", "bf16") for k in depths]
    shapes = [(16, 64, 256, 256)] if quick else [BN2D_LARGE, (16, 64, 256, 256), (64, 256, 56, 56)]
    return gemm + [Case(BN2D, shape) for shape in shapes]
