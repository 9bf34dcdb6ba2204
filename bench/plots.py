"""Charts of a record: forwards over what the hardware could do, whole models over eager."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from .records import COMPILE, EAGER, OURS, OURS_COMPILED, Row, Run

COLOURS = {EAGER: "#b0b7bf", COMPILE: "#5b8db8", OURS: "#d1495b", OURS_COMPILED: "#8a1c2f"}
FORWARDS = "time over a copy or the GEMM alone (fp32: three fp16 GEMMs)"
MODELS = "speed of training over eager's"


def _bar(rows: dict[str, Row], variant: str, models: bool) -> tuple[float, str]:
    """How long, and what is written behind it."""
    row, eager = rows.get(variant), rows.get(EAGER)
    if row is None or not row.valid_ms:
        return 0.0, f" {row.status}" if row else ""
    if models:
        speed = eager.valid_ms / row.valid_ms if eager and eager.valid_ms else 0.0
        return speed, f" {row.rate:,.0f} {row.unit}, {row.ms:.3g} ms"
    return 100 / row.percent_of_limit, f" {row.ms:.3g} ms"


def write(run: Run, suite: str, path: Path) -> None:
    cases = {name: rows for name, rows in run.cases(suite).items() if OURS in rows}
    found = {name for rows in cases.values() for name in rows}
    variants = [name for name in COLOURS if name in found]
    height = 0.78 / len(variants)  # of a bar; cases are 1 apart
    size = 9, 1 + 0.17 * len(variants) * len(cases)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for index, variant in enumerate(variants):
        offset = (index - (len(variants) - 1) / 2) * height
        shown = [_bar(rows, variant, suite == "models") for rows in cases.values()]
        places, lengths = [case + offset for case in range(len(cases))], [bar[0] for bar in shown]
        bars = axes.barh(places, lengths, 0.9 * height, color=COLOURS[variant], label=variant)
        axes.bar_label(bars, [bar[1] for bar in shown], fontsize=7)
    axes.axvline(1, color="#2e4057", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(cases)), list(cases), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(MODELS if suite == "models" else FORWARDS, fontsize=8)
    axes.set(title=f"{suite} ({run.environment.get('device')})", xmargin=0.25)
    figure.legend(loc="outside lower center", ncols=len(variants), fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
