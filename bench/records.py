"""What a run measured, as plain data: rows, their environment, and JSON in and out. All that is shown comes from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

FORMAT = 1  # of the JSON; raised when a field changes its meaning
RECORDED = Path(__file__).parent / "results" / "h200.json"

OURS = "cutlass_bn"
OURS_COMPILED = "cutlass_bn, compiled"  # our module under torch.compile; in steps and overhead alone
EAGER = "eager"
COMPILE = "compile"
MAX_AUTOTUNE = "compile max-autotune"
UNFUSED = "unfused"
GEMM = "gemm"
COPY = "copy"
IEEE = "cutlass_bn ieee_fp32"
SGEMM = "SGEMM"  # torch.mm in IEEE float32, by cuBLAS
SPLIT = "split_matmul"  # splits of both operands included

OK = "ok"
FAILED = "FAILED"  # ran, but the error misses the contract
ERROR = "error"  # raised


@dataclass
class Row:
    """One variant on one case."""

    suite: str
    case: str
    variant: str
    metric: str = "device"  # between CUDA events (wall clock on the CPU); "cpu": host time a call; "kernel": one kernel
    ms: float | None = None  # median
    p10: float | None = None  # ms
    p90: float | None = None  # ms
    samples: int = 0
    limit_ms: float | None = None  # what the hardware could do, from a peer in the same rounds
    work: float | None = None  # bytes or floating-point operations that the case cannot avoid
    unit: str = ""  # of work over time: GB/s or TFLOP/s
    max_abs_error: float | None = None  # of y against float64
    relative_error: float | None = None  # Frobenius
    rowwise_error: float | None = None  # of a @ b: largest over an output's ||row of a|| * ||column of b||
    componentwise_error: float | None = None  # of a @ b: largest over an output's sum of |a| |b|
    gradient_errors: dict[str, float] | None = None  # of a step, by gradient: Frobenius (gradients.py)
    peak_bytes: int | None = None  # of a step: the most that was allocated in it beside what was there before
    exact_tiles: float | None = None  # of a @ b by the split: share of the tiles recomputed in plain float32
    path: str = ""  # of a product: which of SPLIT and SGEMM the layer takes at this size
    tile: str = ""  # of a @ b by the split: which tile the split took, as explain names it
    status: str = OK
    detail: str = ""  # why it failed

    @property
    def valid_ms(self) -> float | None:
        """The time, if the result was right: a wrong result has no speed."""
        return self.ms if self.status == OK else None

    @property
    def rate(self) -> float | None:
        """Work over time in `unit`."""
        if self.valid_ms is None or self.work is None:
            return None
        return self.work / self.valid_ms / (1e6 if self.unit == "GB/s" else 1e9)

    @property
    def percent_of_limit(self) -> float | None:
        if self.valid_ms is None or self.limit_ms is None:
            return None
        return 100 * self.limit_ms / self.valid_ms


def first_line(exception: Exception) -> str:
    """What a row says of an exception."""
    return f"{type(exception).__name__}: {exception}".splitlines()[0]


def ratio(mine: float, other: float) -> float:
    """mine / other, where nothing of nothing is 0."""
    return mine / other if other else (0.0 if mine == 0 else float("inf"))


@dataclass
class Run:
    """A whole run: where it ran, what the hardware gave there, and the rows."""

    environment: dict = field(default_factory=dict)
    ceilings: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.environment.get("device_type") == "cuda"

    def find(self, case: str, variant: str) -> Row | None:
        return next((row for row in self.rows if row.case == case and row.variant == variant), None)

    def cases(self, suite: str | None = None) -> Iterator[tuple[str, list[Row]]]:
        """(case, its rows) in the order measured."""
        names = dict.fromkeys(row.case for row in self.rows if suite in (None, row.suite))
        for name in names:
            yield name, [row for row in self.rows if row.case == name]

    def by_variant(self, suite: str) -> Iterator[tuple[str, dict[str, Row]]]:
        """(case, its rows of this suite by variant) in the order measured."""
        for name, rows in self.cases(suite):
            yield name, {row.variant: row for row in rows if row.suite == suite}

    def speedup(self, row: Row, baseline: str) -> float | None:
        """The baseline's time over the row's, both of the same case; None unless both are right."""
        other = self.find(row.case, baseline)
        if other is None or not row.valid_ms or not other.valid_ms:
            return None
        return other.valid_ms / row.valid_ms

    def save(self, path: Path | str) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"format": FORMAT, **asdict(self)}
        # A line a row, and of a row what says something.
        rows = [{k: v for k, v in row.items() if v not in (None, "")} for row in data.pop("rows")]
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        head = json.dumps(data, indent=1).removesuffix("\n}")
        path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path | str) -> Run:
        data = json.loads(Path(path).read_text())
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: expected format {FORMAT} of python -m bench")
        known = {f.name for f in fields(Row)}
        data["rows"] = [Row(**{k: v for k, v in row.items() if k in known}) for row in data["rows"]]
        return cls(**data)
