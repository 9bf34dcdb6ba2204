"""What tests of the split GEMM share: the split in plain PyTorch, risky inputs, errors, bounds.

The split GEMM makes float32 products of three fp16 ones. u = x w^T throughout, with x [M, K] and w
[N, K].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOSSY = -(2**31)  # in the census
UNIT = 2.0**-24  # the rounding error of float32

Matrix = Callable[[int, int, str], Tensor]  # of rows, k and device


def split_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What csrc/linear_bn/split/split.h makes of a matrix: planes, exponents, census."""
    x = x.contiguous()
    rows, k = x.shape
    largest = x.abs().amax(1) if k else x.new_zeros(rows)
    finite = largest.isfinite()
    x = torch.where(finite[:, None], x, 0.0)
    largest = torch.where(finite, largest, 0.0)
    # largest = f 2^e with f in [1/2, 1): scaled, the row's maximum is in [2^14, 2^15).
    exponents = torch.where(largest == 0, 0, 15 - torch.frexp(largest.double()).exponent).to(
        torch.int32
    )
    scaled = x.double() * torch.exp2(exponents.double())[:, None]
    high = scaled.float().half()
    low = ((scaled - high.double()) * 4096).float().half()
    held = high.double() + low.double() / 4096
    lossy = ((held - scaled).abs() > scaled.abs() * 2**-20) | (
        (scaled - high.double()).abs() > scaled.abs() * 2**-10
    )
    large = (x.abs() >= (largest * 2**-12).clamp(min=2.0**-149)[:, None]).sum(1)
    large = torch.where(largest == 0, k * finite, large).to(torch.int32)
    census = large + LOSSY * (~finite | lossy.any(1)).to(torch.int32)
    return torch.stack([high, low]), exponents, census


def held_by_planes(x: Tensor) -> Tensor:
    """The sum of the planes, scaled back: a float32 number as well."""
    (high, low), exponents, _ = split_reference(x)
    return (high.double() + low.double() / 4096) * torch.exp2(-exponents.double())[:, None]


def left_to_exact_kernel(x: Tensor, w: Tensor) -> Tensor:
    """Bool [M, N]: the products that the split doesn't answer for, by both operands' census."""
    (_, _, x_census), (_, _, w_census) = split_reference(x), split_reference(w)
    few = (x_census & ~LOSSY)[:, None] + (w_census & ~LOSSY) <= x.size(1)
    return few & ((x_census < 0)[:, None] | (w_census < 0))


def uniform(rows: int, k: int, device: str) -> Tensor:
    return torch.rand(rows, k, device=device)


def normal(rows: int, k: int, device: str) -> Tensor:
    return torch.randn(rows, k, device=device)


def positive(rows: int, k: int, device: str) -> Tensor:
    return normal(rows, k, device).abs() + 0.5


def times(factor: float, matrix: Matrix = normal) -> Matrix:
    return lambda *shape: matrix(*shape) * factor


def spanning(binades: float) -> Matrix:
    """Elements of every order of magnitude within these many powers of two."""
    return lambda *shape: normal(*shape) * torch.exp2(-binades * uniform(*shape))


def halves(sign: float) -> Matrix:
    """The second half nearly repeats the first: with both signs, sums cancel to a thousandth."""

    def matrix(rows: int, k: int, device: str) -> Tensor:
        half = normal(rows, k // 2, device)
        again = sign * half * (1 + 1e-3 * normal(rows, k // 2, device))
        return torch.cat([half, again, half.new_zeros(rows, k % 2)], 1)

    return matrix


def some_rows_zero(rows: int, k: int, device: str) -> Tensor:
    return normal(rows, k, device).index_fill_(0, torch.arange(0, rows, 3, device=device), 0.0)


def rows_of_any_size(rows: int, k: int, device: str) -> Tensor:
    return normal(rows, k, device) * torch.exp2(
        torch.randint(-60, 60, (rows, 1), device=device).float()
    )


def identity(rows: int, k: int, device: str) -> Tensor:
    return torch.eye(k, device=device).repeat(-(-rows // k), 1)[:rows].contiguous()


def near_one(rows: int, k: int, device: str) -> Tensor:
    return 1 + uniform(rows, k, device)


def sparse(rows: int, k: int, device: str) -> Tensor:
    """About two elements in a row."""
    return near_one(rows, k, device) * (uniform(rows, k, device) < 2 / k)


def first_columns(values: tuple[float, ...], others: Matrix) -> Matrix:
    def matrix(rows: int, k: int, device: str) -> Tensor:
        return torch.cat(
            [torch.tensor(values, device=device).expand(rows, -1), others(rows, k, device)], 1
        )[:, :k]

    return matrix


@dataclass(frozen=True)
class Operands:
    why: str
    x: Matrix
    w: Matrix = normal

    def __str__(self) -> str:
        return self.why.replace(" ", "-")

    def make(self, m: int, n: int, k: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
        return self.x(m, k, device), self.w(n, k, device)


OPERANDS = [
    Operands("uniform", uniform, uniform),
    Operands("normal", normal),
    Operands("all positive", positive, positive),
    Operands("sums that cancel", halves(-1.0), halves(1.0)),
    Operands("denormal", times(1e-40)),
    Operands("denormal weight", uniform, times(1e-41, uniform)),
    Operands("largest against smallest", times(1e38, uniform), times(1e-38)),
    Operands("smallest against largest", times(1e-38), times(1e38, uniform)),
    Operands("rows of zeros", some_rows_zero, some_rows_zero),
    Operands("input rows of any size", rows_of_any_size),
    Operands("weight rows of any size", normal, rows_of_any_size),
    Operands("identity", normal, identity),
    Operands("10 binades", spanning(10), spanning(10)),
    Operands("20 binades", spanning(20), spanning(20)),
    Operands("40 binades", spanning(40)),
    Operands("60 binades", spanning(60), spanning(60)),
]

# Elements that are small in their row, and alone make a result.
HIDDEN = [
    *(
        Operands(f"rows of 2^{b}, two at a time", times(2.0**b, spanning(10)), sparse)
        for b in (-100, -112, -118, -122)
    ),
    *(
        Operands(f"{b} binades", spanning(b), spanning(b))
        for b in (10, 20, 28, 31, 33, 34, 36, 40, 60)
    ),
    *(
        Operands(f"{b} binades, one at a time", spanning(b), identity)
        for b in (10, 20, 28, 33, 40, 60)
    ),
    *(
        Operands(f"{b} binades, two at a time", spanning(b), sparse)
        for b in (10, 20, 28, 33, 40, 60)
    ),
    *(
        Operands(
            f"2^{b} meets zero", first_columns((2.0**b,), near_one), first_columns((0.0,), sparse)
        )
        for b in (10, 20, *range(28, 37), 40, 60)
    ),
    *(
        Operands(
            f"2^{b} meets zero twice",
            first_columns((2.0**b, 0.0), near_one),
            first_columns((0.0, 2.0**b), sparse),
        )
        for b in (10, 20, *range(28, 37), 40, 60)
    ),
]


def exact_product(x: Tensor, w: Tensor) -> Tensor:
    return x.double() @ w.double().t()


def errors(u: Tensor, x: Tensor, w: Tensor) -> dict[str, float]:
    """Against float64: of all outputs in the Frobenius norm, of each over the norms of its rows."""
    exact = exact_product(x, w)
    error = (u.double() - exact).abs()
    norms = x.double().norm(dim=1)[:, None] * w.double().norm(dim=1)
    return {
        "relative Frobenius error": (error.norm() / exact.norm()).item(),
        # NaN is 0 / 0, of rows of zeros.
        "error of an output": (error / norms).nan_to_num_(0.0, posinf=torch.inf).max().item(),
    }


def excess(u: Tensor, x: Tensor, w: Tensor, extra: int = 0) -> float:
    """The largest error over SGEMM's a-priori bound, K units of sum |x w| an output. At most 1.

    extra: units besides. 8 where K is small: both operands are held to 2^-23, and low times low,
    2^-22, is left out.
    """
    if u.numel() == 0:
        return 0.0
    # 2^-149 is the last place of denormals.
    bound = (x.size(1) + extra) * UNIT * exact_product(x.abs(), w.abs()) + 2.0**-149
    return ((u.double() - exact_product(x, w)).abs() / bound).max().item()
