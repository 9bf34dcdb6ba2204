"""Errors against float64, in pieces that fit in memory, and the contracts that they must meet."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import oracle
import split_cases
import torch
from torch import Tensor, nn

from .cases import BN2D, TRAIN, Case
from .peers import batch_norm_of
from .records import FAILED, Row

PIECE_VALUES = 1 << 26  # float64 values of a piece, at most: 0.5 GiB

# |y - ref| <= tolerance * (1 + |ref|): KernelBench's rule. TF32 has none: it misses fp32's.
TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}
# Of eager's error in the same precision; the small term forgives an eager result that is exact.
EAGER_FACTOR, SLACK = 2.0, 1e-6


class Piece(NamedTuple):
    """A part of an exact result in float64."""

    name: str  # of the result: y, running_mean, dx, ...
    part: tuple[slice, ...]
    value: Tensor
    size: Tensor  # what its error is relative to


def _channels(case: Case, model: nn.Module, x: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(which channels, what is normalised, of gemm_scale_bn the product before bias and scale)."""
    count = case.output_shape[1]
    step = max(1, PIECE_VALUES * count // math.prod(case.output_shape))
    x64 = x.detach().double() if case.kind != BN2D else None
    for begin in range(0, count, step):
        part = slice(begin, begin + step)
        if x64 is None:
            yield part, x[:, part].double(), x[:0]
        else:
            product = x64 @ model.gemm.weight[part].double().t()
            bias, scale = model.gemm.bias[part].double(), model.scale[part].double()
            yield part, (product + bias) * scale, product


def exact(case: Case, model: nn.Module, x: Tensor, dy: Tensor | None) -> Iterator[Piece]:
    """Of a forward, or of a step where there is a dy. model: as it is before either."""
    return _forward(case, model, x) if dy is None else _gradients(case, model, x, dy)


def _forward(case: Case, model: nn.Module, x: Tensor) -> Iterator[Piece]:
    """y, and the running statistics that the forward leaves."""
    bn = batch_norm_of(model)
    for part, z, _ in _channels(case, model, x):
        state = {name: getattr(bn, name)[part].double() for name in ("running_mean", "running_var")}
        running = None if case.mode == TRAIN else tuple(state.values())
        whole = oracle.batch_norm(z, bn.weight[part], bn.bias[part], bn.eps, running)
        yield Piece("y", (slice(None), part), whole.y, whole.y)
        for (name, before), batch in zip(state.items(), (whole.mean, whole.unbiased), strict=True):
            after = torch.lerp(before, batch, bn.momentum) if case.mode == TRAIN else before
            yield Piece(name, (part,), after, after)


def _gradients(case: Case, model: nn.Module, x: Tensor, dy: Tensor) -> Iterator[Piece]:
    """Of a training step. The batch norm's by autograd; those of z = scale * (x W^T + bias) follow.

    dbias is 0, as the mean takes the bias away, and dscale = sum dz (x W^T) cancels to
    eps / (var + eps) of its terms: theirs are measured by the sums of their terms' magnitudes.
    """
    bn = batch_norm_of(model)
    x64 = x.detach().double() if case.kind != BN2D else None
    dx = None if x64 is None else torch.zeros_like(x64)
    for part, z, product in _channels(case, model, x):
        leaves = [t.detach().double().requires_grad_() for t in (z, bn.weight[part], bn.bias[part])]
        with torch.enable_grad():
            y = oracle.batch_norm(*leaves, bn.eps).y
        dz, dgamma, dbeta = torch.autograd.grad(y, leaves, dy[:, part].double())
        yield Piece("dgamma", (part,), dgamma, dgamma)
        yield Piece("dbeta", (part,), dbeta, dbeta)
        if dx is None:
            yield Piece("dx", (slice(None), part), dz, dz)
            continue
        terms = dz * (product - product.mean(0))
        yield Piece("dscale", (part,), terms.sum(0), terms.abs().sum(0))
        dz = dz * model.scale[part].double()
        yield Piece("dbias", (part,), torch.zeros_like(dbeta), dz.abs().sum(0))
        dw = dz.t() @ x64
        yield Piece("dW", (part,), dw, dw)
        dx.addmm_(dz, model.gemm.weight[part].double())
    if dx is not None:
        yield Piece("dx", (slice(None),), dx, dx)


@dataclass(frozen=True)
class Error:
    relative: float  # Frobenius
    max_abs: float
    excess: float  # max |error| / (1 + |exact|)


Results, Errors = Mapping[str, Tensor], dict[str, Error]  # by name: y, running_mean, dx, ...


@torch.no_grad()
def measure(results: Mapping[str, Results], pieces: Iterable[Piece]) -> dict[str, Errors]:
    """Of every variant's results, by name."""
    norms, squared, peaks = defaultdict(float), defaultdict(float), {}
    for name, part, value, size in pieces:
        norms[name] += size.square().sum()
        for variant, found in results.items():
            difference = found[name][part].double().sub_(value).abs_()
            squared[variant, name] += difference.square().sum()
            peak = torch.stack([difference.max(), (difference / (1 + value.abs())).max()])
            # maximum() hands a NaN on, which max() of Python would not
            peaks[variant, name] = torch.maximum(peaks.get((variant, name), peak), peak)
    errors: dict[str, Errors] = {variant: {} for variant in results}
    for (variant, name), total in squared.items():
        frobenius = relative(total.item(), norms[name].item())
        errors[variant][name] = Error(frobenius, *peaks[variant, name].tolist())
    return errors


def relative(squared_error: float, squared_norm: float) -> float:
    """The error over the norm; of what is zero, the error itself."""
    return math.sqrt(squared_error / squared_norm if squared_norm else squared_error)


def fail(row: Row, checks: list[tuple[str, float, float]]) -> None:
    """If one of (what, value, the most allowed) is not kept. A NaN is not."""
    broken = [check for check in checks if not check[1] <= check[2]]
    if broken:
        words = (f"{what} {value:.1e}, allowed {most:.1e}" for what, value, most in broken)
        row.status, row.detail = FAILED, "; ".join(words)


def judge(row: Row, found: Errors, eager: Errors | None, precision: str) -> None:
    """Of a variant. eager: eager's errors in the same precision, None if there are none."""
    checks, tolerance = [], TOLERANCES.get(precision)
    if "y" in found and tolerance is not None:
        if eager and precision in ("bf16", "fp16"):
            # A half-precision product is rounded before it is normalised: eager may leave 1e-2.
            tolerance = max(tolerance, EAGER_FACTOR * eager["y"].excess)
        checks.append(("|y - ref| / (1 + |ref|)", found["y"].excess, tolerance))
    for name in found if eager else ():
        most = EAGER_FACTOR * eager[name].relative + SLACK
        checks.append((f"relative error of {name}", found[name].relative, most))
    fail(row, checks)


@dataclass(frozen=True)
class ProductError:
    """Of a @ b; each the largest of an output but for the second."""

    max_abs: float
    relative: float  # Frobenius
    rowwise: float  # over ||row of a|| * ||column of b||
    componentwise: float  # over |a| @ |b|
    of_bound: float  # over (T + 8) * 2^-24 * (|a| @ |b|), where T products are not zero


@torch.no_grad()
def of_products(results: Results, a: Tensor, b: Tensor) -> dict[str, ProductError]:
    """Compares every result with a @ b in float64.

    The bound is SGEMM's a-priori one, T * 2^-24 * (|a| @ |b|), and the 2^-21 to which the split
    holds a product, besides each rounding of a denormal.
    """
    denormal = (a.shape[1] + 2) * 2.0**-150
    b64, b_there = b.double(), (b != 0).float()
    b_abs, b_norms = b64.abs(), torch.linalg.vector_norm(b64, dim=0)
    squared = torch.zeros(len(results) + 1, dtype=torch.float64, device=a.device)  # last: of a @ b
    peaks = torch.zeros(len(results), 4, dtype=torch.float64, device=a.device)
    step = max(1, PIECE_VALUES // max(b.shape))
    for begin in range(0, a.shape[0], step):
        part = slice(begin, begin + step)
        rows = a[part].double()
        exact = rows @ b64
        by_norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True) * b_norms
        by_sum = rows.abs() @ b_abs
        terms = (a[part] != 0).float() @ b_there  # exact: far below 2^24
        bound = by_sum * ((terms + 8) * split_cases.UNIT) + denormal
        squared[-1] += exact.square().sum()
        for index, result in enumerate(results.values()):
            difference = (result[part].double() - exact).abs_()
            squared[index] += difference.square().sum()
            shares = [_share(difference, of) for of in (by_norm, by_sum, bound)]
            peaks[index] = torch.maximum(peaks[index], torch.stack([difference.max(), *shares]))
    *errors, norm = squared.tolist()
    return {
        name: ProductError(max_abs, relative(error, norm), *shares)
        for name, error, (max_abs, *shares) in zip(results, errors, peaks.tolist(), strict=True)
    }


def _share(difference: Tensor, of: Tensor) -> Tensor:
    """The largest difference / of, where no difference is no share of anything, not even of 0."""
    return torch.where(difference == 0, 0.0, difference / of).max()
