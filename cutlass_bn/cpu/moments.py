"""Mean and variance as exact as y has to be, and what is made of them: stats, running statistics.

PyTorch's kernel of the moments is fast, but adds up float32 one by one where channels are adjacent,
and half precision in float32 everywhere. So such sums are kept short and are merged by Chan's
formula, and a batch that lies too far from zero is measured again around values near its means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common import Vector, lies_near, per_channel, vector_dtype

# How many float32 a thread adds up one by one: that errs by 32 * 2^-24 (measured, the worst
# constant), 8e-6 deviations where the mean is 4 of them away from zero. y may err by 1e-5.
_VALUES, _REACH = 64, 4.0
_CACHED = 8192  # float32 of a first-level cache
# Sums in double are rounded once, by 2^-25 of the mean. The square of that is 1e-9 of the variance
# here, and 1e-7 at a mean of 1e4.
_REACH_IN_DOUBLE = 1024.0


class Moments(NamedTuple):
    """Of x = near + shift: mean and biased variance [C] of near. No shift: x lies near zero
    itself."""

    near: Tensor
    mean: Tensor
    var: Tensor
    shift: Vector = None

    def mean_of_x(self) -> Tensor:
        return self.mean if self.shift is None else self.mean + self.shift


class Sums(NamedTuple):
    """How PyTorch's kernel adds up dense x."""

    x: Tensor
    samples: int  # of C * area adjacent values: N, or N * H * W in channels_last
    area: int
    length: int  # how many samples a sum may take
    reach: float  # how many deviations a mean may be away from zero

    @classmethod
    def of(cls, x: Tensor) -> Sums:
        samples, values = x.size(0), x.numel() // x.size(1)
        if not x.is_contiguous():
            samples = values
        area = values // samples
        if x.dtype == torch.float64 or (x.dtype == torch.float32 and area > 1):
            return cls(x, samples, area, samples, _REACH_IN_DOUBLE)
        # Half precision is added up in 16 sums where a sample has that many values.
        length = _VALUES * min(2, torch.get_num_threads())
        length = length if area == 1 else max(1, 16 * length // area)
        return cls(x, samples, area, length, _REACH)

    def are_short(self) -> bool:
        """Whether one call of the kernel is exact."""
        return self.length >= self.samples

    def reach_to(self, mean: Tensor, var: Tensor) -> bool:
        return lies_near(mean, var, self.reach)

    def calls(self, arrays: int) -> tuple[list[tuple[int, int, int]], int]:
        """(first sample, length, groups) of exact calls, and how many samples the last one is to
        take alone.

        Groups of samples become channels of their own, as many in a call as the cache holds
        `arrays` sums of. A thread takes some samples of each group, so with more of them a call has
        to have more groups.
        """
        n, length = self.samples, self.length
        length = next((part for part in range(length, length // 2, -1) if n % part == 0), length)
        groups = n // length
        step = max(1, _CACHED // arrays * torch.get_num_threads() // self.x.size(1))
        firsts = range(0, groups, step)
        return [(first * length, length, min(step, groups - first)) for first in firsts], n % length

    def part(self, start: int, length: int, groups: int) -> Tensor:
        """length * groups samples from `start` on, each group of which becomes channels of its
        own."""
        channels, area = groups * self.x.size(1), self.area
        offset = self.x.storage_offset() + start * self.x.size(1) * area
        return self.x.as_strided((length, channels, area), (channels * area, area, 1), offset)


def moments(x: Tensor, sums: Sums, known: tuple[Tensor, Tensor] | None = None) -> Moments:
    """Of dense x. known: mean and variance that one call has given."""
    mean, var = known or _measure(sums)
    if sums.reach_to(mean, var):
        return Moments(x, mean, var)
    # A channel's own first value, where that is as near as any, makes a constant channel exactly 0.
    first = x[0].reshape(x.size(1), -1)[:, 0]
    shift = torch.where((first - mean).square() <= 4.0 * var, first, mean).to(vector_dtype(x.dtype))
    shift = shift.nan_to_num_(0.0, 0.0, 0.0)
    for dtype in (shift.dtype, torch.float64):  # float64 is for squares that overflow
        near = x - per_channel(shift.to(dtype), x)
        sums = Sums.of(near)
        mean, var = _measure(sums)
        if sums.reach_to(mean, var):
            break
    return Moments(near, mean, var, shift.double())


def _measure(sums: Sums) -> tuple[Tensor, Tensor]:
    """Mean and biased variance."""
    if sums.are_short():
        return _of_one_call(sums.x)
    calls, rest = sums.calls(arrays=4)  # of sums, means, values, and room
    found = [_of_one_call(sums.part(*call)) for call in calls]
    n, c = sums.samples, sums.x.size(1)
    means, variances = (torch.cat(parts).view(-1, c) for parts in zip(*found, strict=True))
    mean = means.mean(0)
    var = variances.add_(means.sub_(mean).square_()).mean(0)
    if rest:
        rest_mean, rest_var = _of_one_call(sums.part(n - rest, rest, 1))
        weight, apart = rest / n, rest_mean - mean
        mean = mean + apart * weight
        var = var * (1.0 - weight) + rest_var * weight + apart.square() * (weight * (1.0 - weight))
    return mean, var


def _of_one_call(samples: Tensor) -> tuple[Tensor, Tensor]:
    # They come in the dtype of running statistics, if there are: zeros, which then stay zeros.
    running = samples.new_zeros(samples.size(1), dtype=vector_dtype(samples.dtype))
    mean, var = torch.batch_norm_update_stats(samples, running, None, 0.0)
    return mean, var


def stats_of(mean: Tensor, var: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """[3, C] of `dtype`: the mean, what its rounding lacks, invstd."""
    rounded = mean.to(dtype)
    return torch.stack((rounded, mean - rounded, (var + eps).rsqrt_())).to(dtype)


def stats_of_nothing(x: Tensor) -> Tensor:
    return x.new_zeros((3, x.size(1)), dtype=vector_dtype(x.dtype))


def update_running(
    running_mean: Vector, running_var: Vector, num_batches_tracked: Vector, momentum: float | None,
    mean: Tensor, unbiased: Tensor,
) -> None:  # fmt: skip
    """running <- (1 - momentum) * running + momentum * batch, and the batch is counted."""
    if running_mean is not None and running_var is not None:
        if momentum is None:
            if num_batches_tracked is None:
                raise ValueError("momentum None averages over num_batches_tracked: there is none")
            momentum = 1.0 / (num_batches_tracked + 1).item()
        buffers = (running_mean, running_var)
        wide = [buffer.to(torch.promote_types(buffer.dtype, mean.dtype)) for buffer in buffers]
        torch._foreach_mul_(wide, 1.0 - momentum)
        torch._foreach_add_(wide, [mean, unbiased], alpha=momentum)
        for buffer, updated in zip(buffers, wide, strict=True):
            if updated is not buffer:
                buffer.copy_(updated)
    count(num_batches_tracked)


def count(num_batches_tracked: Vector) -> None:
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
