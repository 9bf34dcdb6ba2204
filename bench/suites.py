"""What is measured: of every case errors first, on fresh inputs, then the interleaved times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from . import accuracy, cases, errors, models, peers
from .cases import STEP, Case, Options, matmul_precision
from .peers import Builders, Variant
from .records import COMPILE, COPY, EAGER, LIMITS, OURS, OURS_COMPILED, Row
from .timing import host_times, interleave, peak_bytes, set_time

CPU_SECONDS, CPU_THREADS = 2.0, 2  # of timing a case of the `cpu` suite; of all its cases
HOST_CALLS = 20  # that the `overhead` suite issues at a time: they don't fill the launch queue
LAYERS, HOST = (EAGER, COMPILE, OURS, COPY), (EAGER, OURS, OURS_COMPILED)


def measure(
    suite: str, case: Case, options: Options, names: tuple[str, ...] = (), host: bool = False
) -> list[Row]:
    """One row for every variant, or those named; of a step none for the limits."""
    step = case.mode == STEP
    with matmul_precision(case.precision), torch.set_grad_enabled(step):
        model = peers.eager_model(case, options.device)
        every = peers.variants(case, model, options.compile and options.on_gpu)
        builders = {name: every[name] for name in names or every if name in every}
        rows = {name: Row(suite, case.name, name) for name in builders}
        ready = _check(case, model, builders, rows, options.device)
        inputs = peers.random_inputs(case, options.device)
        calls = {name: variant.timed(inputs) for name, variant in ready.items()}
        times = partial(host_times, count=HOST_CALLS) if host else None
        timings = interleave(calls, options.device, options.timing_seconds, times=times)
    for name, timing in timings.items():
        set_time(rows[name], timing)
        rows[name].metric = "cpu" if host else "device"
    for row in () if host else rows.values():
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
                if dy is not None:  # of a second step, after what the first one set up
                    rows[name].peak_bytes = peak_bytes(partial(variant.step, x, dy), device)
                results[name] = computed
        except Exception as exception:  # whatever a peer raises is its own row's result
            rows[name].raised(exception)
        else:
            ready[name] = variant
    exact = errors.exact(case, model, x, dy)
    found = {name: errors.measure(result, *exact) for name, result in results.items()}
    for name, each in found.items():
        row = rows[name]
        if dy is None:
            row.max_abs_error, row.relative_error = each["y"].max_abs, each["y"].relative
        else:
            row.gradient_errors = {gradient: error.relative for gradient, error in each.items()}
        if dy is None or name in (OURS, OURS_COMPILED):  # PyTorch's gradients are only shown
            errors.judge(row, each, found.get(EAGER, {}))
    return ready


def measure_on_cpu(suite: str, case: Case, options: Options) -> list[Row]:
    """Eager and ours, on as many threads as the suite promises."""
    on_cpu = replace(options, device=torch.device("cpu"), seconds=options.seconds or CPU_SECONDS)
    before = torch.get_num_threads()
    torch.set_num_threads(CPU_THREADS)
    try:
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
    "layers": Suite(cases.layers, partial(measure, names=LAYERS)),
    "models": Suite(models.models, models.measure),
    "accuracy": Suite(accuracy.inputs, accuracy.measure, on_cpu=""),
    "overhead": Suite(cases.overhead, partial(measure, names=HOST, host=True), on_cpu="whole"),
    "crossover": Suite(accuracy.lines, accuracy.measure_line, on_cpu=""),
    "sweep": Suite(cases.sweep, measure),
    "cpu": Suite(cases.cpu, measure_on_cpu, on_cpu="whole"),
}


def run(suite: str, item: Any, options: Options) -> list[Row]:
    """What raises gives a row that says so, and the others still run."""
    torch.compiler.reset()  # no dynamic shapes because an earlier item had another size
    if options.on_gpu:
        torch.cuda.empty_cache()  # what earlier items left is of other sizes
    try:
        return SUITES[suite].measure(suite, item, options)
    except Exception as exception:
        row = Row(suite, item.name, OURS)
        row.raised(exception)
        return [row]


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
