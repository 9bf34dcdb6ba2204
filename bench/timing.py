"""Interleaved timing: one call of every variant a round, so that drift meets all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import quantiles

import torch

from .cases import DTYPES, matmul_precision
from .records import Row, output_of

# GPU cycles (0.75 ms at 2 GHz) that a round waits first for each of its calls. The host issues the
# whole round meanwhile, compiled steps of 1 ms among them, so that a short kernel's time holds no
# launch gaps: those are the `overhead` suite's.
LEAD_CYCLES = 1_500_000

Call = Callable[[int], object]  # takes the number of the round, which picks the input
Calls = Mapping[str, Call]


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call."""

    median: float
    p10: float
    p90: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        tenths = quantiles(samples, n=10, method="inclusive")
        return cls(tenths[4], tenths[0], tenths[8], len(samples))


Timings = dict[str, Timing]


def set_time(row: Row, timing: Timing) -> None:
    row.ms, row.p10, row.p90, row.samples = timing.median, timing.p10, timing.p90, timing.samples


def rotations(size: int, device: torch.device) -> int:
    """So many inputs of `size` bytes that each has left the L2 cache when its turn comes again."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(32, 1 + math.ceil(2 * cache / size)))


def _round_cuda(calls: list[Call], index: int) -> list[float]:
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


def _round_cpu(calls: list[Call], index: int) -> list[float]:
    times = []
    for call in calls:
        start = time.perf_counter()
        call(index)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def interleave(calls: Calls, device: torch.device, seconds: float, most: int = 200) -> Timings:
    """Times every call, for about `seconds` in all. Which goes first moves on by one each round."""
    time_round = _round_cuda if device.type == "cuda" else _round_cpu
    names = list(calls)
    for index in range(2):  # the first pass warms up, the second says how many rounds fit
        cost = sum(time_round([calls[name] for name in names], index)) / 1e3
    rounds = max(5, min(most, int(seconds / max(cost, 1e-6))))
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        order = names[shift:] + names[:shift]
        times = time_round([calls[name] for name in order], index)
        for name, value in zip(order, times, strict=True):
            samples[name].append(value)
    return {name: Timing.of(values) for name, values in samples.items()}


def host_time(calls: Calls, device: torch.device, blocks: int, count: int) -> Timings:
    """The host's time a call: blocks of so few (`count`) that the launch queue doesn't fill."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(blocks + 2):  # the first two warm up
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(count):
                call(0)
            elapsed = time.perf_counter() - start
            if device.type == "cuda":
                torch.cuda.synchronize()
            if block >= 2:
                samples[name].append(1e3 * elapsed / count)
    return {name: Timing.of(values) for name, values in samples.items()}


def measure_ceilings(device: torch.device, quick: bool) -> dict[str, float]:
    """What PyTorch reaches: GB/s of a large copy (read and written), TFLOP/s of large products."""
    if device.type != "cuda":
        return {}
    source = torch.rand(1 << (28 if quick else 30), device=device)
    target = torch.empty_like(source)
    copy = interleave({"copy": lambda _: target.copy_(source)}, device, 0.2)["copy"]
    ceilings = {"copy": 2 * source.nbytes / copy.median / 1e6}
    n = 4096 if quick else 8192
    for precision, dtype in DTYPES.items():
        with matmul_precision(precision):
            a, b = (torch.rand(n, n, device=device).to(dtype) for _ in range(2))
            product = interleave({"mm": lambda _, a=a, b=b: torch.mm(a, b.t())}, device, 0.2)["mm"]
        ceilings[precision] = 2 * n**3 / product.median / 1e9
    return ceilings


def clocks_under_load(device: torch.device) -> dict[str, str]:
    """What nvidia-smi says of the first GPU amid a second of products; {} without it."""
    a = torch.rand(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(600):
        torch.mm(a, a)
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu,driver_version"
    line = output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0")
    return dict(zip(query.split(","), line.split(", "), strict=False)) if line else {}
