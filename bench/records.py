"""What a run measured, as plain data: rows, where they were measured, and JSON in and out."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

import cutlass_bn

from . import ROOT

FORMAT = 1  # of the JSON; raised when a field changes its meaning
RECORDED = ROOT / "bench" / "results" / "h200.json"

OURS = "cutlass_bn"
OURS_COMPILED = "cutlass_bn, compiled"  # of steps: our module compiled; of models: our backend
EAGER, COMPILE, GEMM, COPY = "eager", "compile", "gemm", "copy"
IEEE = "cutlass_bn ieee_fp32"
SGEMM = "SGEMM"  # torch.mm in IEEE float32, by cuBLAS
SPLIT = "split_matmul"  # fp32_matmul, always split; splits of both operands included
LIMITS = (COPY, GEMM)  # a part of the work only, there to compare with

OK = "ok"
FAILED = "FAILED"  # ran, but the error misses the contract
ERROR = "error"  # raised


@dataclass
class Row:
    """One variant on one case."""

    suite: str
    case: str
    variant: str
    metric: str = "device"  # wall clock of models, on the CPU; "cpu": host time; "error": none
    ms: float | None = None  # median
    p10: float | None = None  # ms
    p90: float | None = None  # ms
    samples: int = 0
    limit_ms: float | None = None  # what the hardware could do, from a peer in the same rounds
    work: float | None = None  # bytes or operations that the case cannot avoid; images, rows
    unit: str = ""  # of work over time: GB/s, TFLOP/s, or what a model is given a second
    max_abs_error: float | None = None  # of y against float64
    relative_error: float | None = None  # Frobenius
    rowwise_error: float | None = None  # of a @ b, over an output's |row of a| |column of b|
    gradient_errors: dict[str, float] | None = None  # of a step, by gradient: Frobenius
    off_eager: dict[str, float] | None = None  # of a model: relative, in the same precision
    peak_bytes: int | None = None  # of a step: the most allocated in it beside what was before
    exact_tiles: float | None = None  # of a split product: share of tiles redone in plain float32
    path: str = ""  # of a product: which of SPLIT and SGEMM the layer takes at this size
    tile: str = ""  # of a split product, as explain names it
    status: str = OK
    detail: str = ""  # why it failed

    @property
    def valid_ms(self) -> float | None:
        """The time, if the result was right: a wrong result has no speed."""
        return self.ms if self.status == OK else None

    @property
    def rate(self) -> float | None:
        """Work over time in `unit`."""
        scale = {"GB/s": 1e6, "TFLOP/s": 1e9}.get(self.unit, 1e-3)
        return self.work / self.valid_ms / scale if self.work and self.valid_ms else None

    @property
    def percent_of_limit(self) -> float | None:
        return 100 * self.limit_ms / self.valid_ms if self.limit_ms and self.valid_ms else None

    def raised(self, exception: Exception) -> None:
        self.status, self.detail = ERROR, f"{type(exception).__name__}: {exception}".splitlines()[0]


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

    def cases(self, suite: str | None = None) -> dict[str, dict[str, Row]]:
        """The rows by case, then by variant, in the order measured."""
        found: dict[str, dict[str, Row]] = {}
        for row in self.rows:
            if suite in (None, row.suite):
                found.setdefault(row.case, {})[row.variant] = row
        return found

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"format": FORMAT, **asdict(self)}
        # A line a row, and of a row what says something.
        rows = [{k: v for k, v in row.items() if v not in (None, "")} for row in data.pop("rows")]
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        head = json.dumps(data, indent=1).removesuffix("\n}")
        path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')

    @classmethod
    def load(cls, path: Path) -> Run:
        data = json.loads(path.read_text())
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: expected format {FORMAT} of python -m bench")
        known = {f.name for f in fields(Row)}
        rows = data.pop("rows")
        return cls(**data, rows=[Row(**{k: row[k] for k in row.keys() & known}) for row in rows])


def output_of(*command: str) -> str | None:
    """None where the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe(device: torch.device) -> dict:
    """Device, versions, and the fingerprint of the sources."""
    cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    build = cutlass_bn.build_info()
    return {
        "device_type": device.type,
        "device": cuda.name if cuda else platform.machine(),
        "multiprocessors": cuda.multi_processor_count if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "cutlass_bn": cutlass_bn.__version__,
        "build": {name: build[name] for name in build if name not in ("library", "error")},
        "fingerprint": output_of(sys.executable, str(ROOT / "tools" / "fingerprint.py")),
    }
