"""Errors against float64, and the contracts that they must meet."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import split_cases
import torch
from torch import Tensor, nn

from .cases import BN2D, Case
from .peers import Variant
from .records import FAILED, Row

# Of eager's error in the same precision; the small term forgives an eager result that is exact.
EAGER_FACTOR, SLACK = 2.0, 1e-6

Results = Mapping[str, Tensor]  # by name: y, running_mean, dx, ...


def exact(case: Case, model: nn.Module, x: Tensor, dy: Tensor | None) -> tuple[Results, Results]:
    """The results of a float64 model, and what errors are relative to where that is no result.

    model: as it is before a forward, or a step where there is a dy. There dbias is 0, as the mean
    takes the bias away, and dscale = sum dz (x W^T) cancels to eps / (var + eps) of its terms:
    theirs are measured by the sums of their terms' magnitudes.
    """
    wide, products = copy.deepcopy(model).double(), []
    if dy is not None and case.kind != BN2D:
        wide.gemm.register_forward_hook(lambda module, args, y: products.append(y))
        wide.gemm.register_forward_hook(lambda module, args, y: y.retain_grad())
    x = x.detach().double().requires_grad_(dy is not None)
    results, sizes = Variant(wide, wide).results(x, None if dy is None else dy.double()), {}
    for z in products:
        sizes["dbias"] = z.grad.abs().sum(0)
        sizes["dscale"] = (z.grad * (z - z.mean(0)) / wide.scale).detach().abs().sum(0)
    return results, sizes


class Error(NamedTuple):
    relative: float  # Frobenius
    max_abs: float


Errors = dict[str, Error]


@torch.no_grad()
def measure(result: Results, exact: Results, sizes: Results) -> Errors:
    found, norm = {}, torch.linalg.vector_norm
    for name, value in exact.items():
        difference = (result[name].double() - value).abs_()
        share = relative(norm(difference), norm(sizes.get(name, value)))
        found[name] = Error(share, difference.max().item())
    return found


def relative(error: Tensor, norm: Tensor) -> float:
    """The error over the norm; of what is zero, the error itself."""
    return (error / norm if norm else error).item()


def fail(row: Row, checks: list[tuple[str, float, float]]) -> None:
    """If one of (what, value, the most allowed) is not kept. A NaN is not."""
    broken = [check for check in checks if not check[1] <= check[2]]
    if broken:
        words = (f"{what} {value:.1e}, allowed {most:.1e}" for what, value, most in broken)
        row.status, row.detail = FAILED, "; ".join(words)


def judge(row: Row, found: Errors, eager: Errors) -> None:
    """By eager's errors in the same precision. KernelBench's own rule is for the tests."""
    allowed = {name: EAGER_FACTOR * error.relative + SLACK for name, error in eager.items()}
    fail(row, [(f"relative error of {n}", found[n].relative, most) for n, most in allowed.items()])


class ProductError(NamedTuple):
    """Of a @ b; each the largest of an output but for the second."""

    max_abs: float
    relative: float  # Frobenius
    rowwise: float  # over ||row of a|| * ||column of b||
    of_bound: float  # over (T + 8) * 2^-24 * (|a| @ |b|), where T products are not zero


@torch.no_grad()
def of_products(results: Results, a: Tensor, b: Tensor) -> dict[str, ProductError]:
    """Compares every result with a @ b in float64.

    The bound is SGEMM's a-priori one, T * 2^-24 * (|a| @ |b|), and the 2^-21 to which the split
    holds a product, besides each rounding of a denormal.
    """
    a64, b64, norm = a.double(), b.double(), torch.linalg.vector_norm
    exact = a64 @ b64
    by_norm = norm(a64, dim=1, keepdim=True) * norm(b64, dim=0)
    terms = (a != 0).float() @ (b != 0).float()  # exact: far below 2^24
    denormal = (a.shape[1] + 2) * 2.0**-150
    bound = (a64.abs() @ b64.abs()) * ((terms + 8) * split_cases.UNIT) + denormal
    found = {}
    for name, result in results.items():
        difference = (result.double() - exact).abs_()
        frobenius = relative(norm(difference), norm(exact))
        # No difference is no share of anything, not even of 0.
        shares = [torch.where(difference == 0, 0, difference / of) for of in (by_norm, bound)]
        peaks = [each.max().item() for each in (difference, *shares)]
        found[name] = ProductError(peaks[0], frobenius, *peaks[1:])
    return found
