"""Errors against float64, and the contracts that they must meet.

The oracle comes in slices, of channels or of a product's rows, so that it fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .cases import BN2D, Case
from .records import Row

# A slice of the oracle is at most this many float64 values (0.5 GiB).
SLICE_VALUES = 1 << 26

# |y - ref| <= tolerance * (1 + |ref|): KernelBench's rule (allclose with atol = rtol). TF32 has none: it misses fp32's.
TOLERANCES = {"fp32": 1e-4, "tf32": None, "bf16": 1e-2, "fp16": 1e-2}

UNIT = 2.0**-24  # the rounding error of float32

# Against eager in the same precision; the small term forgives an eager result that happens to be exact.
EAGER_FACTOR = 2.0
SLACK = 1e-6


@dataclass(frozen=True)
class Slice:
    """Channels [begin, end): y in float64, and the running statistics that the step leaves behind."""

    begin: int
    end: int
    y: Tensor
    running_mean: Tensor
    running_var: Tensor


@dataclass(frozen=True)
class Error:
    """Of y, and of the running statistics after the step."""

    max_abs: float
    relative: float  # Frobenius
    excess: float  # max |y - ref| / (1 + |ref|)
    state: float = 0.0  # relative error of running_mean and running_var


def oracle(case: Case, model: nn.Module, x: Tensor) -> Iterator[Slice]:
    """The case's result in float64 from the model's parameters and (not yet updated) running statistics."""
    bn = model if case.kind == BN2D else model.bn
    channels = bn.num_features
    rows = x.numel() // x.shape[1] if case.kind == BN2D else x.shape[0]
    step = max(1, min(channels, SLICE_VALUES // rows))
    x64 = None if case.kind == BN2D else x.double()
    for begin in range(0, channels, step):
        part = slice(begin, min(begin + step, channels))
        if x64 is None:
            z = x[:, part].double()
        else:
            weight, bias = model.gemm.weight[part].double(), model.gemm.bias[part].double()
            z = (x64 @ weight.t() + bias) * model.scale[part].double()
        yield _normalise(z, bn, part, case.training)


def _normalise(z: Tensor, bn: nn.BatchNorm1d | nn.BatchNorm2d, part: slice, training: bool) -> Slice:
    mean, var = bn.running_mean[part].double(), bn.running_var[part].double()
    running_mean, running_var = mean, var
    shape = [1, -1] + [1] * (z.dim() - 2)
    if training:
        dims = [d for d in range(z.dim()) if d != 1]
        var, mean = torch.var_mean(z, dims, correction=0)
        count = z.numel() // z.shape[1]
        running_mean = torch.lerp(running_mean, mean, bn.momentum)
        running_var = torch.lerp(running_var, var * (count / (count - 1)), bn.momentum)
    factor = bn.weight[part].double() * torch.rsqrt(var + bn.eps)
    y = (z - mean.view(shape)) * factor.view(shape) + bn.bias[part].double().view(shape)
    return Slice(part.start, part.stop, y, running_mean, running_var)


def measure_error(y: Tensor, slices: Iterator[Slice], bn: nn.Module | None = None) -> Error:
    """Compares y, and the running statistics of bn after the step, with the oracle."""
    totals = torch.zeros(4, dtype=torch.float64, device=y.device)  # squared error and norm of y, then of the state
    peaks = torch.zeros(2, dtype=torch.float64, device=y.device)
    for part in slices:
        difference = (y[:, part.begin : part.end].double() - part.y).abs_()
        totals[0] += difference.square().sum()
        totals[1] += part.y.square().sum()
        # maximum() hands a NaN on, which max() of Python would not
        peaks[0] = torch.maximum(peaks[0], difference.max())
        peaks[1] = torch.maximum(peaks[1], (difference / (1 + part.y.abs())).max())
        if bn is not None:
            for name in ("running_mean", "running_var"):
                expected = getattr(part, name)
                totals[2] += (getattr(bn, name)[part.begin : part.end].double() - expected).square().sum()
                totals[3] += expected.square().sum()
    squared, norm, state_squared, state_norm = totals.tolist()
    max_abs, excess = peaks.tolist()
    return Error(max_abs, relative(squared, norm), excess, relative(state_squared, state_norm))


@dataclass(frozen=True)
class ProductError:
    """Of a @ b."""

    max_abs: float
    relative: float  # Frobenius
    rowwise: float  # largest |error| / (||row of a|| * ||column of b||)
    componentwise: float  # largest |error| / (|a| @ |b|)
    of_bound: float  # largest |error| / ((T + 8) * 2^-24 * (|a| @ |b|)), T the number of products that are not zero


def product_errors(results: Mapping[str, Tensor], a: Tensor, b: Tensor) -> dict[str, ProductError]:
    """Compares every result with a @ b in float64."""
    k = a.shape[1]
    denormal = (k + 2) * 2.0**-150  # each rounding of a denormal, which no bound relative to the operands knows of
    b64 = b.double()
    b_abs, b_norms, b_there = b64.abs(), torch.linalg.vector_norm(b64, dim=0), (b != 0).float()
    squared = torch.zeros(len(results) + 1, dtype=torch.float64, device=a.device)  # of the errors, then of a @ b
    peaks = torch.zeros(len(results), 4, dtype=torch.float64, device=a.device)
    step = max(1, SLICE_VALUES // max(b.shape))
    for begin in range(0, a.shape[0], step):
        rows = a[begin : begin + step].double()
        exact = rows @ b64
        by_norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True) * b_norms
        by_sum = rows.abs() @ b_abs
        terms = (a[begin : begin + step] != 0).float() @ b_there  # exact: far below 2^24
        bound = by_sum * ((terms + 8) * UNIT) + denormal
        squared[-1] += exact.square().sum()
        for index, result in enumerate(results.values()):
            difference = (result[begin : begin + step].double() - exact).abs_()
            squared[index] += difference.square().sum()
            largest = [difference.max(), *(share(difference, of) for of in (by_norm, by_sum, bound))]
            peaks[index] = torch.maximum(peaks[index], torch.stack(largest))
    *errors, norm = squared.tolist()
    return {
        name: ProductError(max_abs, relative(error, norm), *shares)
        for name, error, (max_abs, *shares) in zip(results, errors, peaks.tolist(), strict=True)
    }


def set_error(row: Row, error: ProductError) -> None:
    row.max_abs_error, row.relative_error = error.max_abs, error.relative
    row.rowwise_error, row.componentwise_error = error.rowwise, error.componentwise


def share(difference: Tensor, of: Tensor) -> Tensor:
    """The largest of difference / of, where no difference is no share of anything, not even of zero."""
    return torch.where(difference == 0, 0.0, difference / of).max()


def worse_than(error: ProductError, other: ProductError) -> list[str]:
    """In which of the two norms that the contract of float32 names the error is larger than the other's, in words."""
    checks = (("relative error", "relative"), ("error over the norms of its row and column", "rowwise"))
    pairs = [(what, getattr(error, name), getattr(other, name)) for what, name in checks]
    return [f"{what} {mine:.1e}, SGEMM's {bound:.1e}" for what, mine, bound in pairs if not mine <= bound]


def outside_bound(error: ProductError) -> list[str]:
    """That an output's error is larger than its bound, in words. A NaN is outside.

    SGEMM's a-priori bound for T products that are not zero, T * 2^-24 * sum |x| |w|, and the 2^-21 to which the split
    holds a product.
    """
    if error.of_bound <= 1:
        return []
    return [f"an output's error is {error.of_bound:.1e} times (T + 8) * 2^-24 * sum |x| |w|"]


def relative(squared_error: float, squared_norm: float) -> float:
    """The error over the norm; of what is zero, the error itself."""
    return math.sqrt(squared_error / squared_norm) if squared_norm else math.sqrt(squared_error)


def broken_contracts(error: Error, eager: Error | None, precision: str) -> list[str]:
    """Which contracts the error misses, in words; empty if it meets them all. A NaN meets none.

    eager: eager's error in the same precision, None if there is none; eager's own is judged with itself.
    """
    checks = []
    tolerance = TOLERANCES[precision]
    if tolerance is not None:
        if eager is not None and precision in ("bf16", "fp16"):
            # A half-precision product is rounded before it is normalised: eager itself may leave 1e-2.
            tolerance = max(tolerance, EAGER_FACTOR * eager.excess)
        checks.append(("|y - ref| / (1 + |ref|)", error.excess, tolerance))
    if eager is not None:
        checks.append(("relative error of y", error.relative, EAGER_FACTOR * eager.relative + SLACK))
        checks.append(("relative error of the running statistics", error.state, EAGER_FACTOR * eager.state + SLACK))
    return [f"{what} {value:.1e}, allowed {bound:.1e}" for what, value, bound in checks if not value <= bound]
