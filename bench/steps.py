"""Training steps, forward and backward: times, the memory that a step takes, and the errors of its gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import peers
from .cases import BN2D, Case, matmul_precision
from .gradients import broken_contracts, gradient_errors, gradients_of
from .peers import Builders, Variant
from .records import COMPILE, COPY, EAGER, ERROR, FAILED, GEMM, MAX_AUTOTUNE, OURS, OURS_COMPILED, Row, first_line
from .timing import interleave, set_time

SUITE = "steps"
STEPPED = (EAGER, COMPILE, MAX_AUTOTUNE, OURS, OURS_COMPILED)
JUDGED = (OURS, OURS_COMPILED)  # by the contract; a peer's errors are shown alone
LIMITS = (COPY, GEMM)  # timed in the same rounds, for the limit alone
# Of the limit of a forward (peers.limit). bn2d: x read and y written, then x and dy read and dx written, where a copy
# reads and writes once. gemm_scale_bn: three products.
LIMIT_FACTORS = {BN2D: 2.5}
PRODUCTS = 3.0


def step_name(case: Case) -> str:
    return f"step {case.name.removesuffix(' train')}"


def step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> None:
    """Leaves the gradients in x and in the model's parameters; those of the step before are dropped first."""
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    run(x).backward(dy)


def repeated(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """The step of this model on this input, to be called again and again."""
    x = x.detach().clone().requires_grad_()
    with torch.no_grad():
        dy = torch.randn_like(model(x))
    return lambda: step(model, model, x, dy)


def measure(
    case: Case,
    device: torch.device,
    seconds: float,
    ceilings: dict,
    build: Callable[[Case, nn.Module], Builders],
) -> list[Row]:
    """One row for every variant of the case that is stepped."""
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with matmul_precision(case.precision):
        model = peers.eager_model(case, device)
        builders = build(case, model)
        x, dy = peers.random_input(case, device).requires_grad_(), _random_gradient(case, device)
        rows, ready = _check(case, model, {name: builders[name] for name in STEPPED if name in builders}, x, dy)
        inputs = [(x, dy), *((x.detach().clone().requires_grad_(), dy.clone()) for x in _others(case, device))]
        calls = {
            name: lambda i, variant=variant: step(variant.run, variant.model, *inputs[i % len(inputs)])
            for name, variant in ready.items()
        }
        for name in LIMITS:
            if name in builders:
                calls[name] = _forward(builders[name]().run, [x.detach() for x, _ in inputs])
        timings = interleave(calls, device, seconds)
    limit = peers.limit(case, timings, ceilings)
    factor = LIMIT_FACTORS.get(case.kind, PRODUCTS)
    work, unit = case.work
    for name, row in rows.items():
        if name in timings:
            set_time(row, timings[name])
        row.limit_ms = None if limit is None else factor * limit
        row.work, row.unit = factor * work, unit
    return list(rows.values())


def _others(case: Case, device: torch.device) -> list[Tensor]:
    return peers.rotating_inputs(case, device)[1:]


def _forward(run: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> Callable[[int], None]:
    @torch.no_grad()
    def call(index: int) -> None:
        run(inputs[index % len(inputs)])

    return call


def _random_gradient(case: Case, device: torch.device) -> Tensor:
    memory_format = torch.channels_last if case.channels_last else torch.contiguous_format
    dy = torch.empty(case.output_shape, dtype=case.dtype, device=device, memory_format=memory_format)
    return dy.normal_()


def _check(
    case: Case, model: nn.Module, builders: Builders, x: Tensor, dy: Tensor
) -> tuple[dict[str, Row], dict[str, Variant]]:
    """Builds every variant, takes a step and compares its gradients with the oracle; one that raises says so."""
    rows = {name: Row(SUITE, step_name(case), name) for name in builders}
    ready, found = {}, {}
    for name, builder in builders.items():
        try:
            variant = builder()
            # The allocator hands this memory to the results: an element that nobody writes stays NaN.
            unwritten = [torch.full_like(tensor, float("nan")) for tensor in (x, dy)]
            del unwritten
            step(variant.run, variant.model, x, dy)
            gradients = gradients_of(variant.model, x)
            rows[name].peak_bytes = _peak_bytes(variant, x, dy)
        except Exception as exception:  # whatever a peer raises is its own row's result
            rows[name].status, rows[name].detail = ERROR, first_line(exception)
        else:
            ready[name], found[name] = variant, gradients
    for name, errors in gradient_errors(found, case, model, x, dy).items():
        rows[name].gradient_errors = errors
    for name in JUDGED:
        if name in found and EAGER in found:
            broken = broken_contracts(rows[name].gradient_errors, rows[EAGER].gradient_errors)
            if broken:
                rows[name].status, rows[name].detail = FAILED, "; ".join(broken)
    return rows, ready


def _peak_bytes(variant: Variant, x: Tensor, dy: Tensor) -> int | None:
    """Of a second step, after whatever the first one set up: y, all gradients, and what comes and goes between."""
    if x.device.type != "cuda":
        return None
    x.grad = None
    for parameter in variant.model.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(variant.run, variant.model, x, dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    x.grad = None
    return peak
