"""What results are measured against: plain float64, and PyTorch's result in the same dtype.

Tolerances. Of y: the contract, |error| < |weight| * (2^-23 * |mean| / std + 1e-5) besides the
rounding to y's dtype. Of everything else: no more than a few times the error that PyTorch makes in
the same dtype, against the same values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Exact:
    """Float64 batch normalisation of x [N, C, ...]; statistics [C]."""

    y: Tensor
    mean: Tensor
    var: Tensor  # biased
    count: int

    @property
    def unbiased(self) -> Tensor:
        return self.var * self.count / (self.count - 1)


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape([1, -1] + [1] * (x.dim() - 2))


def batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    running: tuple[Tensor, Tensor] | None = None,
) -> Exact:
    """Two passes in float64; with `running` = (mean, var) instead of the batch's."""
    wide = x.double()
    dims = [dim for dim in range(x.dim()) if dim != 1]
    if running is None:
        mean = wide.mean(dims)
        var = (wide - per_channel(mean, x)).square().mean(dims)
    else:
        mean, var = (statistic.double() for statistic in running)
    y = (wide - per_channel(mean, x)) / per_channel((var + eps).sqrt(), x)
    if weight is not None:
        y = y * per_channel(weight.double(), x)
    if bias is not None:
        y = y + per_channel(bias.double(), x)
    return Exact(y, mean, var, x.numel() // x.size(1))


def assert_y_keeps_contract(
    y: Tensor, exact: Exact, weight: Tensor | None = None, eps: float = 1e-5
) -> None:
    assert not y.isnan().any(), "y has NaN"
    gain = 1.0 if weight is None else weight.double().abs()
    bound = gain * (2**-23 * exact.mean.abs() / (exact.var + eps).sqrt() + 1e-5)
    # Half a unit in the last place of y, and what the steps before it round in float32.
    last_place = 0.5 * torch.finfo(y.dtype).eps + 2 * torch.finfo(torch.float32).eps
    rounding = last_place * exact.y.abs() + torch.finfo(y.dtype).tiny
    excess = ((y.double() - exact.y).abs() - rounding) / per_channel(
        torch.as_tensor(bound), exact.y
    )
    worst = excess.max().item()
    assert worst < 1, f"error of y is {worst:.2f} times what the contract allows"


def error(actual: Tensor, exact: Tensor, scale: float = 0.0) -> float:
    """Largest absolute error, relative to the largest value or `scale`, whichever is larger."""
    return (
        (actual.double() - exact).abs().max() / exact.abs().max().clamp_min(max(scale, 1e-30))
    ).item()


def spread(terms: Tensor) -> float:
    """How large sums over all dims but C get by random signs: the largest root of a sum of squares.

    The scale of their errors: a sum that happens to be much smaller is no more exact for that, in
    whatever order.
    """
    return (
        terms.double()
        .square()
        .sum([dim for dim in range(terms.dim()) if dim != 1])
        .max()
        .sqrt()
        .item()
    )


def assert_no_worse(
    actual: Tensor, exact: Tensor, peer: Tensor, factor: float = 2.0, scale: float = 0.0
) -> None:
    """`peer` is PyTorch's, of the same dtype; half a unit in the last place is forgiven to both."""
    assert actual.dtype == peer.dtype
    assert actual.shape == exact.shape
    ours, theirs = error(actual, exact, scale), error(peer, exact, scale)
    allowed = factor * max(theirs, torch.finfo(actual.dtype).eps)
    assert ours <= allowed, f"error {ours:.3e}, PyTorch's {theirs:.3e}, allowed {allowed:.3e}"


def poison(device: str, *numels: int) -> None:
    """Leaves NaN where the next allocations of these many float32 elements are likely to lie."""
    if device != "cuda":
        return
    blocks = [
        torch.full((numel,), float("nan"), device=device) for numel in numels for _ in range(3)
    ]
    del blocks
