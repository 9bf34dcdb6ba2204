"""What the tables of a run share: how figures are written, and a table as Markdown or for the terminal (rich)."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from .records import FAILED, OK, Row

DASH = "-"
NOT_RECORDED = "Not in the recorded run."
NOT_REACHED = "not reached"


def number(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def duration(row: Row, value: float | None) -> str:
    """Milliseconds on the device, microseconds for the host and single kernels."""
    if value is None:
        return DASH
    return f"{value:#.4g}" if row.metric == "device" else f"{1e3 * value:.1f}"


def time_or_status(row: Row | None) -> str:
    """A wrong result has no speed."""
    if row is None:
        return DASH
    return duration(row, row.ms) if row.status == OK else row.status


def times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}x"


def markdown_table(header: list[str], lines: Iterable[list[str]]) -> str:
    rule = ["---"] + ["--:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def terminal_table(title: str, header: list[str], lines: Iterable[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for index, column in enumerate(header):
        table.add_column(Text(column), justify="right" if index else "left", overflow="fold")
    for line in lines:
        bad = any(FAILED in cell or NOT_REACHED in cell for cell in line)
        table.add_row(*map(Text, line), style="red" if bad else None)
    return table
