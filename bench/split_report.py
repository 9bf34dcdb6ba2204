"""Tables of the fp32 products: how exact they are, what their parts take, and where SGEMM is as fast."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

from . import accuracy, crossover, products
from .cases import GEMM_SCALE_BN
from .records import FAILED, OK, SGEMM, SPLIT, Row, Run, ratio
from .tables import DASH, NOT_RECORDED, markdown_table, number, terminal_table

Lines = list[list[str]]

TILE_COLUMN = "tile"
ACCURACY_HEADER = [
    "input, MxK->N",
    "layer takes",
    TILE_COLUMN,
    "relative error: SGEMM",
    "split",
    "split / SGEMM",
    "per output: SGEMM",
    "split",
    "elementwise: SGEMM",
    "split",
    "exact tiles, %",
]
ACCURACY_LEGEND = (
    "Relative error: Frobenius norm. Per output: the largest error over the norms of its x row and W row. "
    "Elementwise: the largest error over its sum of |x| |w|. Exact tiles: of the output, recomputed in plain float32 "
    "because the split doesn't answer for one of their products."
)
TILE_LEGEND = " Tile: how the split adds its k-blocks, and the part of the output that a thread block computes."
EXCEPTIONS_LEGEND = (
    "Columns as in the accuracy table. inf: SGEMM's result is exact. FAILED would say that an output is off by more "
    "than (T + 8) * 2^-24 of its sum of |x| |w|, T the number of its products that are not zero."
)
SUMS = {"large": "plain", "small": "compensated"}  # how a split tile adds its k-blocks
_TILE = re.compile(r"split (large|small) (\d+x\d+) tile")


def _tile(split: Row) -> str:
    """As "plain 128x128", of the plan's name."""
    found = _TILE.fullmatch(split.tile)
    return f"{SUMS[found[1]]} {found[2]}" if found else DASH


def accuracy_lines(run: Run, exception: bool = False) -> tuple[list[str], Lines]:
    """(the header, a line for every input); without the tiles where no row names one, as in older records."""

    def errors(field: str, *rows: Row) -> list[str]:
        return ["0" if getattr(row, field) == 0 else number(getattr(row, field), ".1e") for row in rows]

    lines = []
    for case, rows in accuracy.recorded(run, exception):
        name = case.removeprefix(accuracy.EXCEPTION)
        if SGEMM not in rows:  # the step raised
            lines.append([name, FAILED, *[DASH] * (len(ACCURACY_HEADER) - 2)])
            continue
        sgemm, split = rows[SGEMM], rows[SPLIT]
        both_exact = split.relative_error == sgemm.relative_error == 0
        share = DASH if both_exact else number(ratio(split.relative_error, sgemm.relative_error), ".2f")
        lines.append(
            [
                name,
                "split" if split.path == SPLIT else SGEMM,
                _tile(split),
                *errors("relative_error", sgemm, split),
                share if split.status == OK else f"{share} {split.status}",
                *errors("rowwise_error", sgemm, split),
                *errors("componentwise_error", sgemm, split),
                number(None if split.exact_tiles is None else 100 * split.exact_tiles, ".0f"),
            ]
        )
    at = ACCURACY_HEADER.index(TILE_COLUMN)
    if any(line[at] != DASH for line in lines):
        return ACCURACY_HEADER, lines
    header, *lines = (cells[:at] + cells[at + 1 :] for cells in (ACCURACY_HEADER, *lines))
    return header, lines


def _seed(run: Run) -> str:
    return f"seed {run.options.get('seed')}"


def accuracy_markdown(run: Run) -> str:
    header, lines = accuracy_lines(run)
    if not lines:
        return NOT_RECORDED
    legend = ACCURACY_LEGEND + (TILE_LEGEND if TILE_COLUMN in header else "")
    return "\n\n".join([f"{legend} Inputs of {_seed(run)}.", markdown_table(header, lines)])


def exceptions_markdown(run: Run) -> str:
    header, lines = accuracy_lines(run, exception=True)
    if not lines:
        return NOT_RECORDED
    return "\n\n".join([f"{EXCEPTIONS_LEGEND} Inputs of {_seed(run)}.", markdown_table(header, lines)])


def accuracy_table(run: Run) -> Group:
    """Of the inputs under the contract, then of the exceptions; what was not measured is left out."""
    titles = {False: f"accuracy, {_seed(run)}", True: f"where SGEMM may be the more exact, {_seed(run)}"}
    found = {title: accuracy_lines(run, exception) for exception, title in titles.items()}
    return Group(*(terminal_table(title, *table) for title, table in found.items() if table[1]))


def parts_markdown(run: Run) -> str:
    """The kernels of the fp32 layer, the splits, and the products in every operand order."""
    names = {problem.name for problem in products.problems()}
    lines = []
    for name, rows in run.cases(products.SUITE):
        if name in names or (GEMM_SCALE_BN in name and " fp32 " in name):
            for row in rows:
                time = f"{row.ms:#.4g}" if row.valid_ms else row.status
                percent, error = number(row.percent_of_limit, ".0f"), number(row.relative_error, ".1e")
                lines.append([name.removeprefix(f"{products.SUITE} "), row.variant, time, percent, error])
    if not lines:
        return NOT_RECORDED
    return markdown_table(["what", "how", "ms", "% of limit", "relative error"], lines)


_POINT = re.compile(rf"{crossover.SUITE} M=(\d+) N=(\d+) K=(\d+)")
CROSSOVER_LEGEND = (
    "SGEMM's time over the split's: above 1 the split is faster. In brackets: the layer takes SGEMM. "
    "With a star: the split's relative error is larger than SGEMM's."
)
NOISE = 1.03  # times that differ by less are the same


def _points(run: Run) -> Iterator[tuple[tuple[int, int, int], Row, Row]]:
    """((M, N, K), SGEMM's row, the split's row)."""
    for name, rows in run.by_variant(crossover.SUITE):
        point = _POINT.fullmatch(name)
        if point:  # else a step that raised
            m, n, k = map(int, point.groups())
            yield (m, n, k), rows[SGEMM], rows[SPLIT]


def _less_exact(sgemm: Row, split: Row) -> bool:
    return not (split.relative_error or 0.0) <= (sgemm.relative_error or 0.0)


def crossover_lines(run: Run) -> tuple[list[str], Lines]:
    """(the header, a line for every M and N)."""
    cells: dict[tuple[int, int], dict[int, str]] = {}
    for (m, n, k), sgemm, split in _points(run):
        text = number(ratio(sgemm.ms, split.ms), ".2f") + ("*" if _less_exact(sgemm, split) else "")
        cells.setdefault((m, n), {})[k] = text if split.path == SPLIT else f"({text})"
    depths = sorted({k for line in cells.values() for k in line})
    header = ["M, N", *(f"K={k}" for k in depths)]
    return header, [[f"{m}, {n}", *(line.get(k, DASH) for k in depths)] for (m, n), line in cells.items()]


def crossover_verdict(run: Run) -> str:
    """What the dispatcher's choices cost on the grid."""
    losses, less_exact, count = [], 0, 0
    for _, sgemm, split in _points(run):
        count += 1
        inexact = _less_exact(sgemm, split)
        taken, other = (split, sgemm) if split.path == SPLIT else (sgemm, split)
        less_exact += taken is split and inexact
        # SGEMM may be taken for its exactness alone.
        if taken.ms > NOISE * other.ms and not (taken is sgemm and inexact):
            losses.append(taken.ms / other.ms)
    lost = f"at {len(losses)}, at the worst by {max(losses):.2f}x" if losses else "at none"
    return (
        f"Of {count} sizes the layer takes the slower product {lost} (more than {NOISE:g}x; SGEMM where the split is "
        f"less exact is no loss), and the split where it is the less exact at {less_exact}."
    )


def crossover_markdown(run: Run) -> str:
    header, lines = crossover_lines(run)
    if not lines:
        return NOT_RECORDED
    return "\n\n".join([CROSSOVER_LEGEND, markdown_table(header, lines), crossover_verdict(run)])


def crossover_table(run: Run) -> Group:
    table = terminal_table(crossover.SUITE, *crossover_lines(run))
    return Group(table, Text(CROSSOVER_LEGEND), Text(crossover_verdict(run)))
