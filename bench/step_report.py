"""Tables of training steps: times, memory and the errors of the gradients."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from . import steps
from .gradients import INPUT, NAMES
from .records import COMPILE, EAGER, OURS, Row, Run
from .tables import DASH, NOT_RECORDED, markdown_table, number, terminal_table, time_or_status, times

HEADER = ["forward + backward", "how", "ms", "x eager", "x compile", "% of limit", "peak MiB", *NAMES]
LEGEND = (
    "Peak memory: the most that was allocated during a step (y, gradients and whatever comes and goes), beside input, "
    "parameters and y's gradient. Errors against float64: Frobenius norms, relative to the gradient's own; dscale and "
    "dbias cancel, theirs are relative to the sums of their terms' magnitudes. Limit: of gemm_scale_bn three times the "
    "forward's, of bn2d 2.5 copies (x read and y written; x and dy read and dx written)."
)
Lines = list[list[str]]


def mebibytes(row: Row | None) -> str:
    return DASH if row is None or row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}"


def _error(row: Row | None, name: str) -> str:
    return number((row.gradient_errors or {}).get(name) if row else None, ".1e")


def lines(run: Run) -> Iterator[list[str]]:
    """One for every variant of every case."""
    for name, rows in run.by_variant(steps.SUITE):
        for row in rows.values():
            yield [
                name.removeprefix("step "),
                row.variant,
                time_or_status(row),
                times(run.speedup(row, EAGER) if run.on_gpu else None),
                times(run.speedup(row, COMPILE) if run.on_gpu else None),
                number(row.percent_of_limit, ".0f"),
                mebibytes(row),
                *(_error(row, gradient) for gradient in NAMES),
            ]


def table(run: Run) -> Table:
    return terminal_table(steps.SUITE, HEADER, lines(run))


def details_markdown(run: Run) -> str:
    found = list(lines(run))
    return "\n\n".join([LEGEND, markdown_table(HEADER, found)]) if found else NOT_RECORDED


def markdown(run: Run) -> str:
    """One line a case."""
    header = ["forward + backward", "eager", "torch.compile", "cutlass_bn", "x eager", "x compile"]
    header += ["peak MiB (eager's)", "error of dx (eager's)"]
    found: Lines = []
    for name, rows in run.by_variant(steps.SUITE):
        ours, eager = rows.get(OURS), rows.get(EAGER)
        if ours is None:
            continue
        found.append(
            [
                name.removeprefix("step "),
                time_or_status(eager),
                time_or_status(rows.get(COMPILE)),
                f"**{time_or_status(ours)}**",
                times(run.speedup(ours, EAGER)),
                times(run.speedup(ours, COMPILE)),
                f"{mebibytes(ours)} ({mebibytes(eager)})",
                f"{_error(ours, INPUT)} ({_error(eager, INPUT)})",
            ]
        )
    return markdown_table(header, found) if found else NOT_RECORDED
