"""Tables of a run, for the terminal (rich) and as Markdown. Nothing here measures."""

from __future__ import annotations

import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import accuracy, bars, crossover, split_report, step_report, steps
from .records import COMPILE, COPY, EAGER, GEMM, OK, OURS, Row, Run
from .tables import DASH, NOT_REACHED, duration, markdown_table, number, terminal_table, time_or_status, times

NO_SPEED = "No CUDA GPU here: reduced sizes on the CPU path. The errors are checked; the speeds mean nothing."
FORWARD_SUITES = ("workloads", "sweep")
LIMITS = (COPY, GEMM)  # part of the work only, there to compare with


def console() -> Console:
    """As wide as the tables need where the output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=170)


def gain(run: Run, row: Row, baseline: str) -> str:
    """The speed-up over a peer, for variants that compute the case."""
    return DASH if row.variant in LIMITS else times(run.speedup(row, baseline))


def headline(run: Run) -> list[str]:
    env, clocks = run.environment, run.environment.get("clocks", {})
    versions = [f"{name} {env[name]}" for name in ("torch", "cuda", "cudnn", "cutlass_bn") if env.get(name)]
    if clocks:
        versions.append(f"driver {clocks.get('driver_version')}")
    if env.get("fingerprint"):
        versions.append(f"sources {env['fingerprint'][:12]}")
    lines = [", ".join([str(env.get("device")), *versions])]
    if clocks:
        state = (clocks.get(name) for name in ("clocks.sm", "clocks.mem", "power.draw"))
        lines.append("SM clock, memory clock and power under load: " + ", ".join(map(str, state)))
    if run.ceilings:
        rates = ", ".join(f"{name} {value:.0f}" for name, value in run.ceilings.items() if name != "copy")
        lines.append(f"measured ceilings: copy {run.ceilings['copy'] / 1e3:.2f} TB/s; GEMM {rates} TFLOP/s")
    return lines


def took(run: Run) -> str:
    """The time of every suite, compilation and checks included."""
    seconds = run.options["took"]
    each = ", ".join(f"{suite} {value:.0f} s" for suite, value in seconds.items())
    return f"took: {each}; {sum(seconds.values()):.0f} s in all"


def cells(run: Run, row: Row) -> dict[str, str]:
    """A line of the table, by column. A wrong result has no speed, and on the CPU no speed is compared."""
    right = row.status == OK
    unit = "ms" if row.metric == "device" else "us"
    line = {"variant": row.variant, f"median {unit}": duration(row, row.ms) if right else row.status}
    if run.on_gpu:
        line["p10 - p90"] = f"{duration(row, row.p10)} - {duration(row, row.p90)}" if right else DASH
        if row.metric != "kernel":
            line["x eager"] = gain(run, row, EAGER)
    if row.metric == "device":
        if run.on_gpu:
            line["x compile"] = gain(run, row, COMPILE)
            line["% of limit"] = number(row.percent_of_limit, ".0f")
            line["rate"] = DASH if row.rate is None else f"{row.rate:,.0f} {row.unit}"
        line["max error"] = number(row.max_abs_error, ".1e")
        line["rel. error"] = number(row.relative_error, ".1e")
    return {**line, "": row.detail}


def suite_table(run: Run, suite: str) -> Table:
    table = Table("case", title=suite, title_justify="left", title_style="bold", header_style="bold")
    lines = [
        (name if row is rows[0] else "", row, cells(run, row), row is rows[-1])
        for name, rows in run.cases(suite)
        for row in rows
    ]
    columns = list(dict.fromkeys(column for _, _, line, _ in lines for column in line))
    for column in columns:
        text = column in ("variant", "")
        table.add_column(column, justify="left" if text else "right", overflow="fold", no_wrap=not text)
    for name, row, line, last in lines:
        style = "red" if row.status != OK else "bold" if row.variant == OURS else None
        # Text: a detail may hold brackets, which are no markup
        table.add_row(name, *(Text(line.get(column, DASH)) for column in columns), style=style, end_section=last)
    return table


TABLES = {
    accuracy.SUITE: split_report.accuracy_table,
    crossover.SUITE: split_report.crossover_table,
    steps.SUITE: step_report.table,
}


def show(run: Run, out: Console, suites: Collection[str] | None = None) -> None:
    """All of the run, or only these suites."""
    for line in headline(run):
        out.print(line, highlight=False)
    if not run.on_gpu:
        out.print(NO_SPEED, style="bold yellow", highlight=False)
    if run.options.get("took"):
        out.print(took(run), highlight=False)
    for suite in dict.fromkeys(row.suite for row in run.rows):
        if suites is None or suite in suites:
            out.print(TABLES[suite](run) if suite in TABLES else suite_table(run, suite))


BARS_HEADER = ["what", "bar", "measured", ""]


def show_bars(run: Run, out: Console) -> None:
    out.print(terminal_table("bars", BARS_HEADER, map(bar_cells, bars.judge_all(run))))


def bar_cells(outcome: bars.Outcome) -> list[str]:
    verdict = {True: "reached", False: NOT_REACHED, None: "not measured"}[outcome.reached]
    measured = DASH if outcome.value is None else f"{outcome.value:.3g} {outcome.bar.unit}"
    return [outcome.bar.what, outcome.bar.text, measured, f"{verdict} ({outcome.note})" if outcome.note else verdict]


def markdown(run: Run) -> str:
    """One line a case: times in ms, our speed-ups, and the errors against float64."""
    header = ["forward", "eager", "torch.compile", "cutlass_bn", "x eager", "x compile", "% of limit"]
    header.append("error (eager's)")
    lines = []
    for name, rows in run.cases():
        ours = next((row for row in rows if row.variant == OURS and row.suite in FORWARD_SUITES), None)
        if ours is None:
            continue
        eager, compiled = run.find(name, EAGER), run.find(name, COMPILE)
        errors = f"{number(ours.relative_error, '.1e')} ({number(eager.relative_error if eager else None, '.1e')})"
        lines.append(
            [
                name,
                time_or_status(eager),
                time_or_status(compiled),
                f"**{time_or_status(ours)}**",
                times(run.speedup(ours, EAGER)),
                times(run.speedup(ours, COMPILE)),
                number(ours.percent_of_limit, ".0f"),
                errors,
            ]
        )
    head = headline(run) if run.on_gpu else [*headline(run), NO_SPEED]
    return "\n\n".join(["  \n".join(head), markdown_table(header, lines)])


def bars_markdown(run: Run) -> str:
    return markdown_table(BARS_HEADER, map(bar_cells, bars.judge_all(run)))
