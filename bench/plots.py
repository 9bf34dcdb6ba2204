"""Plots of a recorded run, as PNG files. Reads rows; measures nothing."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .cases import BN2D, DTYPES, GEMM_LARGE, GEMM_SCALE_BN
from .records import COMPILE, EAGER, GEMM, OURS, Row, Run

COLOURS = {EAGER: "#b0b7bf", COMPILE: "#5b8db8", OURS: "#d1495b", GEMM: "#2e4057"}
LABELS = {EAGER: "PyTorch eager", COMPILE: "torch.compile", OURS: "cutlass_bn", GEMM: "GEMM alone (cuBLAS)"}
BARS = (EAGER, COMPILE, OURS)


def _valid(rows: list[Row], variant: str) -> float | None:
    return next((row.valid_ms for row in rows if row.variant == variant), None)


def _grouped_bars(axes: Axes, groups: list[tuple[str, list[Row]]], axis: str) -> None:
    """One group a case, a bar for each variant, as a multiple of the limit."""
    height = 0.26
    labelled: set[str] = set()
    for index, (_, rows) in enumerate(groups):
        for offset, variant in enumerate(BARS):
            row = next((row for row in rows if row.variant == variant), None)
            if row is None or row.limit_ms is None:
                continue
            y = index + (offset - 1) * height
            if row.valid_ms is None:
                axes.text(0, y, f" {row.status}", va="center", fontsize=7, color=COLOURS[variant])
                continue
            value = row.valid_ms / row.limit_ms
            label = None if variant in labelled else LABELS[variant]
            labelled.add(variant)
            axes.barh(y, value, height * 0.9, color=COLOURS[variant], label=label)
            axes.text(value, y, f" {row.valid_ms:.3g} ms", va="center", fontsize=7)
    axes.axvline(1, color=COLOURS[GEMM], linewidth=1, linestyle="--")
    axes.set_yticks(range(len(groups)), [name for name, _ in groups], fontsize=8)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlabel(axis, fontsize=8)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def workloads(run: Run) -> Figure | None:
    """The two workloads, every precision and mode: time over the hardware's limit."""
    groups = list(run.cases("workloads"))
    if not groups:
        return None
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.55 * len(groups)), layout="constrained")
    _grouped_bars(
        axes,
        groups,
        "time over the limit: a copy of the tensor, or the GEMM alone (fp32: three fp16 GEMMs); shorter is better",
    )
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=len(BARS))
    axes.set_title(_title(run, "forward"), fontsize=10)
    return figure


def gemm_sweep(run: Run) -> Figure | None:
    """gemm_scale_bn over K: what each variant takes over the GEMM alone."""
    lines = {}
    m, _, n = GEMM_LARGE
    for precision in DTYPES:
        points = {}
        for name, rows in run.cases():
            found = re.fullmatch(rf"{GEMM_SCALE_BN} {m}x(\d+)->{n} {precision} train", name)
            if found:
                points[int(found.group(1))] = rows
        if len(points) > 1:
            lines[precision] = dict(sorted(points.items()))
    if not lines:
        return None
    figure, all_axes = plt.subplots(1, len(lines), figsize=(4.5 * len(lines), 3.4), layout="constrained", squeeze=False)
    for axes, (precision, points) in zip(all_axes[0], lines.items(), strict=True):
        for variant in BARS:
            curve = [(k, _valid(rows, variant), _valid(rows, GEMM)) for k, rows in points.items()]
            curve = [(k, mine / gemm) for k, mine, gemm in curve if mine and gemm]
            if curve:
                axes.plot(*zip(*curve, strict=True), marker="o", color=COLOURS[variant], label=LABELS[variant])
        axes.axhline(1, color=COLOURS[GEMM], linewidth=1, linestyle="--", label=LABELS[GEMM])
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(points), [str(k) for k in points])
        axes.set_xlabel("K")
        axes.set_ylabel("time over the GEMM alone")
        axes.set_title(_title(run, f"Linear, scale, BatchNorm1d, {precision}, training"), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].legend(fontsize=8, frameon=False)
    return figure


def batch_norm_sweep(run: Run) -> Figure | None:
    """BatchNorm2d in training over shapes and memory formats."""
    groups = [(name, rows) for name, rows in run.cases() if name.startswith(BN2D) and name.endswith("train")]
    if len(groups) < 2:
        return None
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.55 * len(groups)), layout="constrained")
    _grouped_bars(axes, groups, "time over a copy of the tensor; shorter is better")
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=len(BARS))
    axes.set_title(_title(run, "BatchNorm2d, training"), fontsize=10)
    return figure


def _title(run: Run, what: str) -> str:
    return f"{what} ({run.environment.get('device')})" + ("" if run.on_gpu else ", reduced sizes: speeds mean nothing")


PLOTS = {"workloads": workloads, "gemm_sweep": gemm_sweep, "batch_norm_sweep": batch_norm_sweep}


def write(run: Run, directory: Path) -> list[Path]:
    """Writes every plot that the run has rows for."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in PLOTS.items():
        figure = draw(run)
        if figure is None:
            continue
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=130)
        plt.close(figure)
        written.append(path)
    return written
