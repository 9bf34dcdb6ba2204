"""The tables that stand in documents between markers, `<!-- name -->` and `<!-- /name -->`, as Markdown of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from . import report, split_report, step_report
from .environment import ROOT
from .records import Run

TABLES: dict[tuple[str, str], Callable[[Run], str]] = {
    ("README.md", "measured"): report.markdown,
    ("README.md", "steps"): step_report.markdown,
    ("docs/performance.md", "bars"): report.bars_markdown,
    ("docs/performance.md", "steps"): step_report.details_markdown,
    ("docs/performance.md", "split"): split_report.parts_markdown,
    ("docs/performance.md", "crossover"): split_report.crossover_markdown,
    ("docs/numerics.md", "accuracy"): split_report.accuracy_markdown,
    ("docs/numerics.md", "exceptions"): split_report.exceptions_markdown,
}


def _between(marker: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {marker} -->\n).*?(?=\n<!-- /{marker} -->)", re.DOTALL)


def shown(document: str, marker: str) -> str:
    """What stands between the markers."""
    found = _between(marker).findall((ROOT / document).read_text())
    if len(found) != 1:
        raise ValueError(f"{document}: expected one pair of markers {marker}, found {len(found)}")
    return found[0].strip()


def write(run: Run) -> list[Path]:
    """Puts the run's tables into the documents; which of them changed."""
    changed = []
    for (document, marker), render in TABLES.items():
        table = render(run).strip()
        if shown(document, marker) != table:
            path = ROOT / document
            path.write_text(_between(marker).sub(lambda _, table=table: table, path.read_text()))
            changed.append(path)
    return list(dict.fromkeys(changed))
