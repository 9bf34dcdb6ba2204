"""The figures that this library set out to reach on one H200, as data: what, computed how, and the bar."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import accuracy
from .cases import BN2D, BN2D_LARGE, GEMM_FP32_OTHERS, GEMM_LARGE, GEMM_SCALE_BN, Case
from .products import SPLIT_ALONE, X_SPLIT
from .records import COMPILE, COPY, EAGER, GEMM, OK, OURS, OURS_COMPILED, SGEMM, SPLIT, Run, ratio
from .steps import step_name
from .suites import CUBLAS, FUSED

Source = tuple[str, str]  # case, variant


@dataclass(frozen=True)
class Bar:
    """value = factor * time(source) / time(over) - minus; without `over`, the time in ms. Or of another field of Row.

    Reached where value <= most, value >= least, or value < below.
    """

    what: str
    source: Source
    over: Source | None
    most: float | None = None
    least: float | None = None
    below: float | None = None
    factor: float = 1.0
    minus: float = 0.0
    unit: str = "x"
    field: str = "ms"

    @property
    def text(self) -> str:
        relations = (("<=", self.most), (">=", self.least), ("<", self.below))
        return " and ".join(f"{sign} {bound:g} {self.unit}" for sign, bound in relations if bound is not None)

    def reached(self, value: float) -> bool:
        """False of a NaN."""
        return (
            (self.most is None or value <= self.most)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
        )


@dataclass(frozen=True)
class ErrorBar:
    """The largest ratio of the split's error to SGEMM's over the accuracy table, where the layer takes the split.

    The exceptions have a table of their own, and don't count.
    """

    what: str
    error: str  # a field of Row
    most: float = 1.0
    unit: str = "x"

    @property
    def text(self) -> str:
        return f"<= {self.most:g} {self.unit}"


@dataclass(frozen=True)
class Outcome:
    """reached is None where a row is missing; note says which, or that a result was wrong."""

    bar: Bar | ErrorBar
    value: float | None
    reached: bool | None
    note: str = ""


LARGE = Case(BN2D, BN2D_LARGE).name
LARGE_EVAL = Case(BN2D, BN2D_LARGE, training=False).name
MIDDLE = Case(BN2D, (16, 64, 256, 256)).name
GEMM_TRAIN = {p: Case(GEMM_SCALE_BN, GEMM_LARGE, p).name for p in ("fp32", "tf32", "bf16")}
GEMM_EVAL = {p: Case(GEMM_SCALE_BN, GEMM_LARGE, p, training=False).name for p in ("fp32", "tf32", "bf16")}
FP32_OTHERS = [Case(GEMM_SCALE_BN, shape).name for shape in GEMM_FP32_OTHERS]
TINY = {mode: f"overhead BatchNorm2d 8x16x8x8 fp32 {mode}" for mode in ("train", "eval", "step")}
TINY_LINEAR_STEP = "overhead LinearBatchNorm1d 64x32->32 fp32 step"

# Training steps, forward and backward: at most so many ms.
STEPS: dict[Case, float] = {
    Case(GEMM_SCALE_BN, GEMM_LARGE, "fp32"): 10.5,
    Case(GEMM_SCALE_BN, GEMM_LARGE, "tf32"): 5.9,
    Case(GEMM_SCALE_BN, GEMM_LARGE, "bf16"): 2.75,
    Case(GEMM_SCALE_BN, (16384, 1024, 4096), "bf16"): 1.0,
    Case(BN2D, BN2D_LARGE): 8.2,
    Case(BN2D, (16, 64, 256, 256)): 0.55,
    **{Case(BN2D, (64, 256, 56, 56), channels_last=last): 0.42 for last in (False, True)},
    **{Case(BN2D, (128, 512, 28, 28), "bf16", channels_last=last): 0.30 for last in (False, True)},
}


def _over(case: str, peer: str, most: float) -> Bar:
    return Bar(f"{case}, time over {peer}'s", (case, OURS), (case, peer), most=most)


def _faster(case: str, peer: str, least: float) -> Bar:
    return Bar(f"{case}, faster than {peer}", (case, peer), (case, OURS), least=least)


def _less_memory(case: str) -> Bar:
    return Bar(f"{case}, peak memory over eager's", (case, OURS), (case, EAGER), below=1.0, field="peak_bytes")


def _compiled_use(case: str) -> Bar:
    return Bar(f"{case}, compiled use over eager use", (case, OURS_COMPILED), (case, OURS), most=1.05)


BARS: tuple[Bar | ErrorBar, ...] = (
    Bar(f"{GEMM_TRAIN['fp32']}, time", (GEMM_TRAIN["fp32"], OURS), None, most=3.1, unit="ms"),
    _faster(GEMM_TRAIN["fp32"], EAGER, 3.6),
    Bar(f"{GEMM_EVAL['fp32']}, time", (GEMM_EVAL["fp32"], OURS), None, most=2.95, unit="ms"),
    *(_faster(case, EAGER, 3.0) for case in FP32_OTHERS),
    Bar("split of x in fp32, time over copy's", (X_SPLIT.name, SPLIT_ALONE), (X_SPLIT.name, COPY), most=1.1),
    ErrorBar("fp32 product, relative error over SGEMM's, worst input of the accuracy table", "relative_error"),
    ErrorBar("fp32 product, error per output over SGEMM's, worst input of the accuracy table", "rowwise_error"),
    _over(LARGE, COMPILE, 1.05),
    _faster(LARGE, EAGER, 2.6),
    Bar(f"{MIDDLE}, time", (MIDDLE, OURS), None, most=0.21, unit="ms"),
    _faster(MIDDLE, EAGER, 2.3),
    _faster(MIDDLE, COMPILE, 2.3),
    _over(LARGE_EVAL, COPY, 1.05),
    *(
        Bar(
            f"moments in the epilogue, {precision}: GEMM with them over cuBLAS's without",
            (f"kernels {GEMM_TRAIN[precision]}", FUSED),
            (f"kernels {GEMM_TRAIN[precision]}", CUBLAS),
            most=most,
            factor=100,
            minus=100,
            unit="%",
        )
        for precision, most in (("tf32", 3.0), ("bf16", 5.0))
    ),
    _over(GEMM_TRAIN["tf32"], COMPILE, 1.02),
    _over(GEMM_TRAIN["bf16"], COMPILE, 1.05),
    _over(GEMM_TRAIN["fp32"], COMPILE, 1.0),
    *(_over(GEMM_EVAL[precision], GEMM, 1.03) for precision in ("tf32", "bf16")),
    *(
        Bar(f"finalise kernel, {p}", (f"kernels {GEMM_TRAIN[p]}", "finalise"), None, most=8.0, factor=1e3, unit="us")
        for p in ("tf32", "bf16")
    ),
    *(
        Bar(f"{step_name(case)}, time", (step_name(case), OURS), None, most=most, unit="ms")
        for case, most in STEPS.items()
    ),
    *(_less_memory(step_name(case)) for case in STEPS if case.kind == GEMM_SCALE_BN),
    *(_compiled_use(step_name(case)) for case in STEPS),
    *(_over(case, EAGER, 1.5) for case in (*TINY.values(), TINY_LINEAR_STEP)),
)


def judge(run: Run, bar: Bar | ErrorBar) -> Outcome:
    return _judge_error(run, bar) if isinstance(bar, ErrorBar) else _judge_rows(run, bar)


def _judge_rows(run: Run, bar: Bar) -> Outcome:
    figures = []
    for source in (bar.source, bar.over):
        if source is None:
            figures.append(1.0)
            continue
        row = run.find(*source)
        if row is None:
            return Outcome(bar, None, None, f"no row for {source[1]}")
        if row.status != OK:
            return Outcome(bar, None, False, f"{source[1]}: {row.status}")
        figures.append(getattr(row, bar.field) or float("nan"))
    value = bar.factor * figures[0] / figures[1] - bar.minus
    return Outcome(bar, value, bar.reached(value))


def _judge_error(run: Run, bar: ErrorBar) -> Outcome:
    ratios = {}
    for name, rows in accuracy.recorded(run):
        if SPLIT not in rows:
            return Outcome(bar, None, False, f"no result for {name}")
        if rows[SPLIT].path == SPLIT:
            ratios[name] = ratio(getattr(rows[SPLIT], bar.error), getattr(rows[SGEMM], bar.error))
    if not ratios:
        return Outcome(bar, None, None, "no accuracy rows")
    worst = max(ratios, key=lambda name: math.inf if math.isnan(ratios[name]) else ratios[name])
    return Outcome(bar, ratios[worst], ratios[worst] <= bar.most, worst)


def judge_all(run: Run) -> list[Outcome]:
    return [judge(run, bar) for bar in BARS]
