"""Runs cases: errors first, on fresh inputs, then the interleaved timing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import torch
from torch import nn

import cutlass_bn

from . import accuracy, cases, crossover, peers, products, steps
from .cases import Case, matmul_precision
from .errors import Error, broken_contracts, measure_error, oracle
from .peers import Builders, Variant
from .records import EAGER, ERROR, FAILED, GEMM, OURS, OURS_COMPILED, Row, first_line
from .timing import Timing, host_time, interleave, kernel_times, set_time


@dataclass(frozen=True)
class Options:
    device: torch.device
    quick: bool = False
    compile: bool = True
    max_autotune: bool = False
    seconds: float = 1.5  # of timing a case
    only: str = ""  # part of a step's name
    seed: int = 0  # of the accuracy suite's inputs

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def build_variants(case: Case, model: nn.Module, options: Options, stepped: bool = False) -> Builders:
    return peers.variants(case, model, options.compile and options.on_gpu, options.max_autotune, stepped)


def measure(
    suite: str,
    case: Case,
    options: Options,
    ceilings: dict | None = None,
    build: Callable[[Case, nn.Module, Options], Builders] = build_variants,
) -> list[Row]:
    """One row for every variant of the case."""
    torch.compiler.reset()  # no dynamic shapes because an earlier case had another size
    if options.on_gpu:
        torch.cuda.empty_cache()  # what earlier cases left is of other sizes
    with matmul_precision(case.precision), torch.no_grad():
        model = peers.eager_model(case, options.device)
        rows, ready = _check(suite, case, build(case, model, options), model, options.device)
        inputs = peers.rotating_inputs(case, options.device)
        calls = {name: lambda i, run=variant.run: run(inputs[i % len(inputs)]) for name, variant in ready.items()}
        timings = interleave(calls, options.device, options.seconds)
    for name, timing in timings.items():
        set_time(rows[name], timing)
    limit = peers.limit(case, timings, ceilings or {})
    for row in rows.values():
        row.limit_ms = limit
        row.work, row.unit = case.work
    return list(rows.values())


def _check(
    suite: str, case: Case, builders: Builders, model: nn.Module, device: torch.device
) -> tuple[dict[str, Row], dict[str, Variant]]:
    """Builds every variant and compares its first result with the oracle; one that raises gets a row that says so."""
    rows: dict[str, Row] = {}
    ready: dict[str, Variant] = {}
    x = peers.random_input(case, device)
    eager_error: Error | None = None
    for name, builder in builders.items():
        row = rows[name] = Row(suite, case.name, name)
        try:
            variant = builder()
            # The allocator hands this memory to the result: an element that nobody writes stays NaN.
            torch.full(case.output_shape, float("nan"), dtype=case.dtype, device=device)
            y = variant.run(x)
            if variant.checked:
                error = measure_error(y, oracle(case, model, x), variant.bn)
                if name == EAGER:
                    eager_error = error
                row.max_abs_error, row.relative_error = error.max_abs, error.relative
                broken = broken_contracts(error, eager_error, case.precision)
                if broken:
                    row.status, row.detail = FAILED, "; ".join(broken)
            del y
        except Exception as exception:  # whatever a peer raises is its own row's result
            row.status, row.detail = ERROR, first_line(exception)
        else:
            ready[name] = variant
    return rows, ready


def overhead(options: Options) -> list[Row]:
    """The host's time for a call on an input so small that the device hardly works."""
    torch.compiler.reset()  # what other suites compiled counts towards its limit of recompilations
    device = options.device
    norm = nn.BatchNorm2d(16, device=device)
    ours_norm = cutlass_bn.BatchNorm2d(16, device=device)
    linear = peers.GemmScaleBatchNorm(32, 32, device)
    ours_linear = cutlass_bn.LinearBatchNorm1d(32, 32, scale=True, device=device)
    image, features = torch.rand(8, 16, 8, 8, device=device), torch.rand(64, 32, device=device)
    pairs = {
        "BatchNorm2d 8x16x8x8": (image, {EAGER: norm, OURS: ours_norm}),
        "LinearBatchNorm1d 64x32->32": (features, {EAGER: linear, OURS: ours_linear}),
    }
    blocks = 3 if not options.on_gpu else 10 if options.quick else 40
    rows = []
    for name, (x, modules) in pairs.items():
        for mode in ("train", "eval", "step"):
            for module in modules.values():
                module.train(mode != "eval")
            if mode == "step":  # of fewer calls a block, as each has many more kernels
                if options.compile and options.on_gpu:
                    modules = {**modules, OURS_COMPILED: peers.compiled_whole(modules[OURS])}
                calls = {variant: steps.repeated(module, x) for variant, module in modules.items()}
                timings = host_time(calls, device, blocks, calls_a_block=20)
            else:
                with torch.no_grad():
                    timings = host_time({v: partial(module, x) for v, module in modules.items()}, device, blocks)
            for variant, timing in timings.items():
                row = Row("overhead", f"overhead {name} fp32 {mode}", variant, metric="cpu")
                set_time(row, timing)
                rows.append(row)
    return rows


# What a kernel does, by the first pattern that its name matches. A CUTLASS kernel's name spells out all its types,
# hence it comes first.
FUSED = "gemm with moments"
ROLES = (
    (re.compile(r"cutlass(::|\d+)device_kernel"), FUSED),  # mangled where the name is too long for the profiler
    (re.compile(r"exact_kernel"), "exact tiles"),
    (re.compile(r"split_(rows|columns)|column_maxima"), "split"),
    (re.compile(r"resident"), "on chip"),
    (re.compile(r"finali[sz]e", re.IGNORECASE), "finalise"),
    (re.compile(r"normali[sz]e|transform", re.IGNORECASE), "normalise"),
    (re.compile(r"stats|moments", re.IGNORECASE), "moments"),
    (re.compile(r"gemm|nvjet|cutlass::", re.IGNORECASE), GEMM),
)
CUBLAS = f"{GEMM} (cuBLAS)"
BLOCKS, CALLS = 10, 8  # blocks of calls under the profiler, ours and cuBLAS's in turn; a sample is a block's mean


def role(kernel: str) -> str:
    """One of ROLES, or the start of the kernel's name."""
    return next((name for pattern, name in ROLES if pattern.search(kernel)), kernel[:40])


def time_kernels(case: Case, options: Options) -> list[Row]:
    """One row for every kernel of our forward, and one for cuBLAS's GEMM; by the profiler."""
    with matmul_precision(case.precision), torch.no_grad():
        model = peers.eager_model(case, options.device)
        builders = peers.variants(case, model, compile=False)
        runs = {name: builders[name]().run for name in (OURS, GEMM) if name in builders}
        inputs = peers.rotating_inputs(case, options.device)
        samples: dict[str, list[float]] = {}
        for block in range(BLOCKS + 1):  # the first warms up
            for name, run in runs.items():
                sums: dict[str, float] = {}  # a role may take several kernels a call
                for kernel, values in kernel_times(run, islice(cycle(inputs), CALLS)).items():
                    label = CUBLAS if name == GEMM else role(kernel)
                    sums[label] = sums.get(label, 0.0) + sum(values) / CALLS
                for label, value in sums.items() if block else ():
                    samples.setdefault(label, []).append(value)
    rows = []
    for label, values in samples.items():
        row = Row("kernels", f"kernels {case.name}", label, metric="kernel")
        set_time(row, Timing.of(values))
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Step:
    """What is measured, and fails, as one."""

    suite: str
    name: str
    measure: Callable[[dict], list[Row]]  # of the ceilings

    def run(self, ceilings: dict) -> list[Row]:
        """A step that raises gives a row that says so, and the others still run."""
        try:
            return self.measure(ceilings)
        except Exception as exception:
            return [Row(self.suite, self.name, OURS, status=ERROR, detail=first_line(exception))]


def _case_steps(suite: str, options: Options) -> list[Step]:
    found = [case if options.on_gpu else case.reduced() for case in getattr(cases, suite)(options.quick)]
    return [
        Step(suite, case.name, lambda ceilings, case=case: measure(suite, case, options, ceilings)) for case in found
    ]


def _training_steps(options: Options) -> list[Step]:
    found = [case if options.on_gpu else case.reduced() for case in cases.steps(options.quick)]
    return [
        Step(
            steps.SUITE,
            steps.step_name(case),
            lambda ceilings, case=case: steps.measure(
                case, options.device, options.seconds, ceilings, partial(build_variants, options=options, stepped=True)
            ),
        )
        for case in found
    ]


def _kernel_steps(options: Options) -> list[Step]:
    calls = [
        Step("kernels", f"kernels {case.name}", lambda _, case=case: time_kernels(case, options))
        for case in cases.kernels(options.quick)
    ]
    return calls + [
        Step("kernels", problem.name, lambda _, problem=problem: problem.measure(options.device, options.seconds))
        for problem in products.problems()
    ]


def _accuracy_steps(options: Options) -> list[Step]:
    return [
        Step("accuracy", kind.name, lambda _, kind=kind: accuracy.measure(kind, options.device, options.seed))
        for kind in accuracy.inputs(options.quick)
    ]


def _crossover_steps(options: Options) -> list[Step]:
    return [
        Step("crossover", crossover.line_name(*line[:2]), lambda _, line=line: crossover.measure(*line, options.device))
        for line in crossover.grid(options.quick)
    ]


_STEPS: dict[str, Callable[[Options], list[Step]]] = {
    "workloads": partial(_case_steps, "workloads"),
    steps.SUITE: _training_steps,
    "kernels": _kernel_steps,
    "accuracy": _accuracy_steps,
    "overhead": lambda options: [Step("overhead", "overhead", lambda _: overhead(options))],
    "crossover": _crossover_steps,
    "sweep": partial(_case_steps, "sweep"),
}
SUITES = tuple(_STEPS)
GPU_SUITES = ("kernels", "accuracy", "crossover")  # of kernels, which a CPU has none of


def plan(suites: Iterable[str], options: Options) -> list[Step]:
    """The steps in the order to run, one that two suites share once."""
    planned: dict[str, Step] = {}
    for suite in suites:
        for step in _STEPS[suite](options) if options.on_gpu or suite not in GPU_SUITES else ():
            if options.only in step.name:
                planned.setdefault(step.name, step)
    return list(planned.values())
