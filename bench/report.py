"""What is shown of a run: tables for the terminal (rich) and as Markdown. Nothing here measures."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from . import ROOT
from .records import COMPILE, EAGER, ERROR, FAILED, LIMITS, OK, OURS, SGEMM, SPLIT, Row, Run

DASH = "-"
GRADIENTS = ("dx", "dgamma", "dbeta", "dresidual", "dW", "dbias", "dscale")
TIMES, OFF_EAGER = ("ms", "p10", "p90"), ("loss", "gradient norm")
NO_SPEED = "No CUDA GPU: reduced sizes on the CPU path. Errors are checked; the times mean nothing."
ON_CPU = ("cpu", "overhead")  # suites whose times mean something there
README = ROOT / "README.md"
IN_README = (  # the cases of its table
    "gemm_scale_bn 16384x4096->4096 fp32 train",
    "gemm_scale_bn 16384x4096->4096 fp32 eval",
    "gemm_scale_bn 16384x4096->4096 tf32 train",
    "gemm_scale_bn 16384x4096->4096 bf16 train",
    "bn2d 64x64x512x512 fp32 train",
    "bn2d 64x64x512x512 fp32 eval",
    "bn2d 128x512x28x28 bf16 train",
    "bn2d 128x512x28x28 channels_last bf16 train",
    "step gemm_scale_bn 16384x4096->4096 fp32",
    "step bn2d 128x512x28x28 bf16",
)
MEASURED = re.compile(r"(?<=<!-- measured -->\n).*?(?=\n<!-- /measured -->)", re.DOTALL)


class Table(NamedTuple):
    title: str
    header: list[str]
    lines: list[list[str]]
    note: str = ""


def table(title: str, lines: Iterable[dict[str, str]], note: str = "") -> Table:
    """Of cells by column; a column where no line has anything is left out."""
    lines = list(lines)
    header = [name for name in (lines[0] if lines else ()) if any(line[name] for line in lines)]
    blanks = {name: "" if name == "case" else DASH for name in header}
    found = [[line[name] or blank for name, blank in blanks.items()] for line in lines]
    return Table(title, header, found, note)


def as_markdown(found: Table) -> str:
    rule = ["---"] + ["--:"] * (len(found.header) - 1)
    rows = (found.header, rule, *found.lines)
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    return f"{text}\n\n{found.note}" if found.note else text


def as_text(found: Table) -> RichTable:
    shown = RichTable(title=f"\n{found.title}", caption=found.note or None, box=box.SIMPLE_HEAD)
    shown.show_edge, shown.pad_edge, shown.padding = False, False, (0, 1, 0, 0)
    shown.title_justify = shown.caption_justify = "left"
    shown.title_style = "bold"
    for index, name in enumerate(found.header):
        shown.add_column(name, justify="right" if index else "left", no_wrap=name != "why")
    for cells in found.lines:
        bad = any(word in cell for cell in cells for word in (FAILED, ERROR))
        shown.add_row(*map(Text, cells), style="red" if bad else "bold" if OURS in cells else None)
    return shown


def console() -> Console:
    """As wide as the tables need where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 300, highlight=False)


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def faster(rows: dict[str, Row], variant: str, baseline: str) -> str:
    """By which factor the variant is faster; nothing unless both are right."""
    mine, other = (rows[name].valid_ms if name in rows else None for name in (variant, baseline))
    return f"{other / mine:.2f}x" if mine and other else ""


def error(row: Row | None) -> float | None:
    """Of y, or of a step's dx."""
    return row and (row.gradient_errors or {"dx": row.relative_error})["dx"]


def compared(run: Run, row: Row) -> bool:
    """Whether its time means something."""
    return run.on_gpu or row.suite in ON_CPU


def cells(run: Run, rows: dict[str, Row], row: Row) -> dict[str, str]:
    """A line of a suite's table, by column. A wrong result has no speed."""
    speeds = compared(run, row)
    peer = speeds and row.variant not in LIMITS
    errors, off = row.gradient_errors or {}, row.off_eager or {}
    times = {name: number(row.valid_ms and getattr(row, name), "#.4g") for name in TIMES}
    split = row.variant == SPLIT and SGEMM in rows and rows[SGEMM].relative_error
    return {
        "case": row.case if row is next(iter(rows.values())) else "",
        "variant": row.variant,
        **(times if speeds else {**times, "p10": "", "p90": ""}),
        "x eager": faster(rows, row.variant, EAGER) if peer else "",
        "x compile": faster(rows, row.variant, COMPILE) if peer else "",
        "% of limit": number(row.percent_of_limit, ".0f") if speeds else "",
        "rate": f"{row.rate:,.0f} {row.unit}" if row.rate and run.on_gpu else "",
        "peak MiB": number(row.peak_bytes and row.peak_bytes / 2**20, ",.0f"),
        "max error": number(row.max_abs_error, ".1e"),
        "rel. error": number(row.relative_error, ".1e"),
        "x SGEMM's": number(row.relative_error / split, ".2f") if split else "",
        "per output": number(row.rowwise_error, ".1e"),
        **{name: number(errors.get(name), ".1e") for name in GRADIENTS},
        **{f"{name} off eager's": number(off.get(name), ".1e") for name in OFF_EAGER},
        "exact tiles": number(row.exact_tiles, ".0%"),
        "layer takes": row.path,
        "tile": row.tile,
        "why": "" if row.status == OK else f"{row.status}: {row.detail}",
    }


def crossover(run: Run) -> Table:
    """SGEMM's time over the split's, a line for every M and N."""
    lines: dict[str, dict[str, str]] = {}
    for name, rows in run.cases("crossover").items():
        if not {SGEMM, SPLIT} <= rows.keys():  # the step raised
            continue
        size, depth = name.removeprefix("crossover ").rsplit(" ", 1)
        sgemm, split = rows[SGEMM], rows[SPLIT]
        less_exact = not split.relative_error <= sgemm.relative_error
        text = f"{sgemm.ms / split.ms:.2f}{'*' * less_exact}"
        lines.setdefault(size, {})[depth] = text if split.path == SPLIT else f"({text})"
    depths = dict.fromkeys((depth for line in lines.values() for depth in line), "")
    found = ({"M, N": size, **depths, **line} for size, line in lines.items())
    note = "In brackets: the layer takes SGEMM. *: the split is the less exact."
    return table("crossover: SGEMM's time over the split's", found, note)


def tables(run: Run) -> Iterator[Table]:
    """Every suite's, in the order measured."""
    for suite in dict.fromkeys(row.suite for row in run.rows):
        if suite == "crossover":
            yield crossover(run)
        else:
            title = f"{suite}, seed {run.options.get('seed')}" if suite == "accuracy" else suite
            groups = run.cases(suite).values()
            yield table(title, (cells(run, rows, r) for rows in groups for r in rows.values()))


def summary(run: Run, title: str, names: Iterable[str], note: str = "") -> Table:
    """One line a case: times in ms, our speed-ups, and the error of y, or of a step's dx."""
    lines, cases = [], run.cases()
    for rows in (cases[name] for name in names if OURS in cases.get(name, ())):
        peers = {"eager": EAGER, "torch.compile": COMPILE, "cutlass_bn": OURS}
        found = {column: rows[variant] for column, variant in peers.items() if variant in rows}
        times = {c: number(r.ms, "#.4g") if r.status == OK else r.status for c, r in found.items()}
        mine, eagers = (number(error(rows.get(v)), ".1e") or DASH for v in (OURS, EAGER))
        speeds = compared(run, rows[OURS])
        lines.append(
            {
                "what": rows[OURS].case,
                **{column: times.get(column, "") for column in peers},
                "x eager": faster(rows, OURS, EAGER) if speeds else "",
                "x compile": faster(rows, OURS, COMPILE) if speeds else "",
                "error (eager's)": f"{mine} ({eagers})",
            }
        )
    return table(title, lines, note)


def readme_table(run: Run) -> Table:
    device, torch = (run.environment.get(name) for name in ("device", "torch"))
    note = f"Medians in ms on one {device}, torch {torch}; relative errors against float64."
    return summary(run, "recorded", IN_README, note)


def in_readme() -> str:
    """What README says was measured, between its markers."""
    found = MEASURED.findall(README.read_text())
    if len(found) != 1:
        raise ValueError(f"{README}: expected one pair of measured markers, found {len(found)}")
    return found[0]


def write_readme(run: Run) -> None:
    in_readme()  # raises where there is no place for the table
    text = as_markdown(readme_table(run))
    README.write_text(MEASURED.sub(lambda _: text, README.read_text()))


def headline(run: Run) -> list[str]:
    env, rates, took = run.environment, dict(run.ceilings), run.options.get("took", {})
    versions = [f"{name} {env[name]}" for name in ("torch", "cuda", "cutlass_bn") if env.get(name)]
    sources = (env.get("fingerprint") or "unknown")[:12]
    lines = [", ".join([str(env.get("device")), *versions, f"sources {sources}"])]
    if rates:
        copy, gemm = rates.pop("copy"), ", ".join(f"{name} {rates[name]:.0f}" for name in rates)
        lines.append(f"ceilings: copy {copy / 1e3:.2f} TB/s; GEMM {gemm} TFLOP/s")
    if took:
        lines.append("took: " + ", ".join(f"{suite} {took[suite]:.0f} s" for suite in took))
    return lines if all(compared(run, row) for row in run.rows) else [*lines, NO_SPEED]


def show(run: Run, out: Console, found: Iterable[Table]) -> None:
    for line in headline(run):
        out.print(line)
    for each in found:
        out.print(as_text(each))


def markdown(run: Run, found: Iterable[Table]) -> str:
    texts = (f"**{each.title}**\n\n{as_markdown(each)}" for each in found)
    return "\n\n".join(["  \n".join(headline(run)), *texts])
