"""What is measured: of every case errors first, on fresh inputs, then the interleaved times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import accuracy, cases, errors, peers
from .cases import STEP, Case, Options, matmul_precision
from .peers import Builders, Variant
from .records import EAGER, ERROR, LIMITS, OURS, OURS_COMPILED, Row
from .timing import host_time, interleave, set_time

Names = tuple[str, ...] | None  # of variants; None: all
CPU_SECONDS, CPU_THREADS = 2.0, 2  # of timing a case of the `cpu` suite; of all its cases


def _builders(case: Case, model: nn.Module, options: Options, names: Names = None) -> Builders:
    found = peers.variants(case, model, options.compile and options.on_gpu)
    return {name: found[name] for name in names or found if name in found}


def measure(suite: str, case: Case, options: Options, names: Names = None) -> list[Row]:
    """One row for every variant of the case; of a step without those of the limits."""
    torch.compiler.reset()  # no dynamic shapes because an earlier case had another size
    if options.on_gpu:
        torch.cuda.empty_cache()  # what earlier cases left is of other sizes
    step = case.mode == STEP
    with matmul_precision(case.precision), torch.set_grad_enabled(step):
        model = peers.eager_model(case, options.device)
        builders = _builders(case, model, options, names)
        rows = {name: Row(suite, case.name, name) for name in builders}
        ready = _check(case, model, builders, rows, options.device)
        inputs = peers.random_inputs(case, options.device)
        calls = {name: variant.timed(inputs) for name, variant in ready.items()}
        timings = interleave(calls, options.device, options.timing_seconds)
    for name, timing in timings.items():
        set_time(rows[name], timing)
    for row in rows.values():
        row.limit_ms = peers.limit(case, timings, options.ceilings)
        row.work, row.unit = case.work
    return [row for row in rows.values() if not (step and row.variant in LIMITS)]


def _check(
    case: Case, model: nn.Module, builders: Builders, rows: dict[str, Row], device: torch.device
) -> dict[str, Variant]:
    """Builds every variant and compares its results with float64; those that didn't raise."""
    x, dy = peers.random_input(case, device)
    shapes = case.input_shape, case.output_shape
    ready, results = {}, {}
    for name, builder in builders.items():
        try:
            variant = builder()
            # The allocator hands this memory to the results: what nobody writes stays NaN.
            nans = [torch.full(s, torch.nan, dtype=case.dtype, device=device) for s in shapes]
            del nans
            if name in LIMITS:
                variant.run(x)
            else:
                computed = variant.results(x, dy)
                rows[name].peak_bytes = _peak_bytes(variant, x, dy)
                results[name] = computed
        except Exception as exception:  # whatever a peer raises is its own row's result
            rows[name].status, rows[name].detail = ERROR, _first_line(exception)
        else:
            ready[name] = variant
    found = errors.measure(results, errors.exact(case, model, x, dy))
    for name, each in found.items():
        row = rows[name]
        if dy is None:
            row.max_abs_error, row.relative_error = each["y"].max_abs, each["y"].relative
        else:
            row.gradient_errors = {gradient: error.relative for gradient, error in each.items()}
        if dy is None or name in (OURS, OURS_COMPILED):  # PyTorch's gradients are only shown
            errors.judge(row, each, found.get(EAGER), case.precision)
    return ready


def _first_line(exception: Exception) -> str:
    return f"{type(exception).__name__}: {exception}".splitlines()[0]


def _peak_bytes(variant: Variant, x: Tensor, dy: Tensor | None) -> int | None:
    """Of a second step, after what the first one set up: y, all gradients, what comes and goes."""
    if dy is None or x.device.type != "cuda":
        return None
    variant.drop_gradients(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    variant.step(x, dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    x.grad = None
    return peak


def overhead(suite: str, case: Case, options: Options) -> list[Row]:
    """The host's time for a call that the device has hardly any work with."""
    torch.compiler.reset()  # what was compiled before counts towards its limit of recompilations
    blocks = 3 if not options.on_gpu else 10 if options.quick else 40
    step = case.mode == STEP
    with torch.set_grad_enabled(step):
        model = peers.eager_model(case, options.device)
        builders = _builders(case, model, options, (EAGER, OURS, OURS_COMPILED))
        inputs = [peers.random_input(case, options.device)]
        calls = {name: build().timed(inputs) for name, build in builders.items()}
        # Fewer steps than forwards a block, as each launches many more kernels.
        timings = host_time(calls, options.device, blocks, count=20 if step else 50)
    rows = [Row(suite, case.name, name, metric="cpu") for name in calls]
    for row in rows:
        set_time(row, timings[row.variant])
    return rows


def measure_on_cpu(suite: str, case: Case, options: Options) -> list[Row]:
    """Eager and ours, on as many threads as the suite promises."""
    seconds = options.seconds or CPU_SECONDS
    before = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    try:
        on_cpu = replace(options, device=torch.device("cpu"), seconds=seconds)
        return measure(suite, case, on_cpu, (EAGER, OURS))
    finally:
        torch.set_num_threads(before)


class Suite(NamedTuple):
    items: Callable[[bool], list[Any]]  # of quick; each has a name
    measure: Callable[[str, Any, Options], list[Row]]  # of suite and item
    on_cpu: str = "reduced"  # or "whole", or "" where the CPU has no such kernels


SUITES = {
    "workloads": Suite(cases.workloads, measure),
    "steps": Suite(cases.steps, measure),
    "accuracy": Suite(accuracy.inputs, accuracy.measure, on_cpu=""),
    "overhead": Suite(cases.overhead, overhead, on_cpu="whole"),
    "crossover": Suite(accuracy.lines, accuracy.measure_line, on_cpu=""),
    "sweep": Suite(cases.sweep, measure),
    "cpu": Suite(cases.cpu, measure_on_cpu, on_cpu="whole"),
}


def run(suite: str, item: Any, options: Options) -> list[Row]:
    """What raises gives a row that says so, and the others still run."""
    try:
        return SUITES[suite].measure(suite, item, options)
    except Exception as exception:
        return [Row(suite, item.name, OURS, status=ERROR, detail=_first_line(exception))]


def plan(suites: Iterable[str], options: Options) -> list[tuple[str, Any]]:
    """(suite, item) in the order to run, an item that two suites share once."""
    planned: dict[str, tuple[str, Any]] = {}
    for suite in suites:
        items, _, on_cpu = SUITES[suite]
        for item in items(options.quick) if options.on_gpu or on_cpu else ():
            item = item.reduced() if on_cpu == "reduced" and not options.on_gpu else item
            if options.only in item.name:
                planned.setdefault(item.name, (suite, item))
    return list(planned.values())
