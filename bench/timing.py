"""Interleaved timing: one call of every variant a round, so that drift of clocks and power meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .records import Row

# GPU cycles (0.75 ms at 2 GHz) that a round waits first for each of its calls. The host issues the whole round
# meanwhile, compiled steps of 1 ms among them, so that a short kernel's time holds no launch gaps: those are the
# `overhead` suite's.
LEAD_CYCLES = 1_500_000

Call = Callable[[int], object]  # takes the number of the round, which picks the input


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        tenths = quantiles(samples, n=10, method="inclusive")
        return cls(tenths[4], tenths[0], tenths[8], len(samples))


def set_time(row: Row, timing: Timing) -> None:
    row.ms, row.p10, row.p90, row.samples = timing.median, timing.p10, timing.p90, timing.samples


def _round_cuda(calls: list[Call], index: int) -> list[float]:
    torch.cuda._sleep(LEAD_CYCLES * len(calls))
    events = []
    for call in calls:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(index)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _round_cpu(calls: list[Call], index: int) -> list[float]:
    times = []
    for call in calls:
        start = time.perf_counter()
        call(index)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def interleave(
    calls: Mapping[str, Call], device: torch.device, seconds: float, min_rounds: int = 5, max_rounds: int = 200
) -> dict[str, Timing]:
    """Times every call for about `seconds` in all. Which call goes first moves on by one each round."""
    time_round = _round_cuda if device.type == "cuda" else _round_cpu
    names = list(calls)
    for index in range(2):  # the first pass warms up, the second says how many rounds fit
        cost = sum(time_round([calls[name] for name in names], index)) / 1e3
    rounds = max(min_rounds, min(max_rounds, int(seconds / max(cost, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        order = names[shift:] + names[:shift]
        for name, value in zip(order, time_round([calls[name] for name in order], index), strict=True):
            samples[name].append(value)
    return {name: Timing.of(values) for name, values in samples.items()}


def host_time(
    calls: Mapping[str, Callable[[], object]], device: torch.device, blocks: int, calls_a_block: int = 50
) -> dict[str, Timing]:
    """The host's time a call, without waiting for the device: interleaved blocks, too few to fill the launch queue."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(blocks + 2):  # the first two warm up
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(calls_a_block):
                call()
            elapsed = time.perf_counter() - start
            if device.type == "cuda":
                torch.cuda.synchronize()
            if block >= 2:
                samples[name].append(1e3 * elapsed / calls_a_block)
    return {name: Timing.of(values) for name, values in samples.items()}


def kernel_times(run: Callable[[Tensor], object], inputs: Iterable[Tensor]) -> dict[str, list[float]]:
    """Milliseconds of every kernel that run launches over these inputs, by kernel name. CUDA only.

    A kernel counts from the end of the one before: programmatic dependent launch starts it earlier, only to wait.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for x in inputs:
            run(x)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return exclusive_times((event.name, event.time_range.start, event.time_range.end) for event in kernels)


def exclusive_times(kernels: Iterable[tuple[str, float, float]]) -> dict[str, list[float]]:
    """Milliseconds by name from (name, start, end) in microseconds, time shared with an earlier kernel left out."""
    times: dict[str, list[float]] = {}
    busy_until = float("-inf")
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        times.setdefault(name, []).append(max(0.0, end - max(start, busy_until)) / 1e3)
        busy_until = max(busy_until, end)
    return times
