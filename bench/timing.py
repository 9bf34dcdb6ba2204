"""Interleaved timing: one call of every variant a round, so that drift meets all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from statistics import quantiles
from typing import NamedTuple

import torch

from .cases import DTYPES, matmul_precision
from .records import Row

# GPU cycles (0.75 ms at 2 GHz) that a round waits first for each of its calls. The host issues the
# whole round meanwhile, compiled steps of 1 ms among them, so that a short kernel's time holds no
# launch gaps: those are the `overhead` suite's.
LEAD_CYCLES = 1_500_000

Call = Callable[[int], object]  # takes the number of the round, which picks the input
Calls = Mapping[str, Call]
Times = Callable[[list[Call], int], list[float]]  # of a round, ms a call


class Timing(NamedTuple):
    """Milliseconds a call; the names are those of Row."""

    ms: float  # median
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        tenths = quantiles(samples, n=10, method="inclusive")
        return cls(tenths[4], tenths[0], tenths[8], len(samples))


def set_time(row: Row, timing: Timing) -> None:
    vars(row).update(timing._asdict())


def rotations(size: int, device: torch.device) -> int:
    """So many inputs of `size` bytes that each has left the L2 cache when its turn comes again."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(32, 1 + math.ceil(2 * cache / size)))


def device_times(calls: list[Call], index: int) -> list[float]:
    torch.cuda._sleep(LEAD_CYCLES * len(calls))
    events = []
    for call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(index)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def host_times(calls: list[Call], index: int, count: int = 1, waits: bool = False) -> list[float]:
    """By wall clock, `count` calls at a time; waits: until the device is done with them, too."""
    times = []
    for call in calls:
        start = time.perf_counter()
        for _ in range(count):
            call(index)
        issued = time.perf_counter()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        end = time.perf_counter() if waits else issued
        times.append(1e3 * (end - start) / count)
    return times


def interleave(
    calls: Calls, device: torch.device, seconds: float, most: int = 200, times: Times | None = None
) -> dict[str, Timing]:
    """Times every call, for about `seconds` in all. Which goes first moves on by one each round."""
    times = times or (device_times if device.type == "cuda" else host_times)
    names = list(calls)
    if not names:
        return {}
    for index in range(2):  # the first pass warms up, the second says how many rounds fit
        begin = time.perf_counter()
        times(list(calls.values()), index)
        cost = time.perf_counter() - begin
    rounds = max(5, min(most, int(seconds / max(cost, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        order = names[shift:] + names[:shift]
        for name, value in zip(order, times([calls[n] for n in order], index), strict=True):
            samples[name].append(value)
    return {name: Timing.of(values) for name, values in samples.items()}


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The most that a call allocates beside what was there before it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_ceilings(device: torch.device, quick: bool) -> dict[str, float]:
    """What PyTorch reaches: GB/s of a large copy (read and written), TFLOP/s of large products."""
    if device.type != "cuda":
        return {}
    source = torch.rand(1 << (28 if quick else 30), device=device)
    target = torch.empty_like(source)
    copy = interleave({"copy": lambda _: target.copy_(source)}, device, 0.2)["copy"]
    ceilings = {"copy": 2 * source.nbytes / copy.ms / 1e6}
    n = 4096 if quick else 8192
    for precision, dtype in DTYPES.items():
        with matmul_precision(precision):
            a, b = (torch.rand(n, n, device=device).to(dtype) for _ in range(2))
            product = interleave({"mm": lambda _, a=a, b=b: torch.mm(a, b.t())}, device, 0.2)["mm"]
        ceilings[precision] = 2 * n**3 / product.ms / 1e9
    return ceilings
