"""Charts of recorded forwards: every variant's time over what the hardware could do."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from .records import COMPILE, EAGER, OURS, Run

COLOURS = {EAGER: "#b0b7bf", COMPILE: "#5b8db8", OURS: "#d1495b"}
HEIGHT = 0.26  # of a bar; cases are 1 apart


def write(run: Run, suite: str, path: Path) -> None:
    cases = {name: rows for name, rows in run.cases(suite).items() if OURS in rows}
    figure, axes = plt.subplots(figsize=(9, 1 + 0.5 * len(cases)), layout="constrained")
    for offset, (variant, colour) in enumerate(COLOURS.items(), start=-1):
        percents = [rows[variant].percent_of_limit for rows in cases.values()]
        bars = axes.barh(
            [index + offset * HEIGHT for index in range(len(cases))],
            [100 / percent if percent else 0.0 for percent in percents],
            0.9 * HEIGHT,
            color=colour,
            label=variant,
        )
        axes.bar_label(bars, [f" {rows[variant].ms:.3g} ms" for rows in cases.values()], fontsize=7)
    axes.axvline(1, color="#2e4057", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(cases)), list(cases), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time over a copy or the GEMM alone (fp32: three fp16 GEMMs)", fontsize=8)
    axes.set(title=f"{suite} ({run.environment.get('device')})", xmargin=0.1)
    axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
