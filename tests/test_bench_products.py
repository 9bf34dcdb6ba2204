"""The benchmark of the fp32 products: its inputs, errors, verdicts and tables, with the ops' arithmetic in PyTorch."""

import io
import math
from dataclasses import replace

import pytest
import torch
from split_cases import left_to_exact_kernel, split_reference

from bench import accuracy, bars, crossover, errors, products, report, split_report, suites
from bench.records import COPY, ERROR, FAILED, OK, OURS, SGEMM, SPLIT, Row, Run
from bench.tables import NOT_RECORDED

CPU = torch.device("cpu")
SMALL = [replace(kind, m=192, k=min(kind.k, 1024), n=64) for kind in accuracy.inputs(quick=True)]


def split_product(a, b):
    """a @ b of the planes, its sums exact; plain float32 where a row can't be held."""
    sides, rows = [], []
    for matrix in (a, b.t()):
        planes, exponents, census = split_reference(matrix)
        hi, lo = planes[..., : matrix.shape[1]].double()
        sides.append((hi, lo, torch.exp2(-exponents.double())[:, None]))
        rows.append(census)
    (a_hi, a_lo, a_scale), (b_hi, b_lo, b_scale) = sides
    u = (a_hi @ b_hi.t() + (a_hi @ b_lo.t() + a_lo @ b_hi.t()) / 4096) * a_scale * b_scale.t()
    return torch.where(left_to_exact_kernel(*rows, a.size(1)), torch.mm(a, b), u.float())


@pytest.fixture(autouse=True)
def _ops_in_pytorch(monkeypatch):
    for module in (accuracy, crossover, products):
        monkeypatch.setattr(module.ops, "split_fp32", split_reference, raising=False)
        monkeypatch.setattr(module.ops, "split_matmul", split_product, raising=False)


@pytest.fixture
def layer_takes(monkeypatch):
    """Sets which product the layer is said to take."""

    def set_path(path):
        for module in (accuracy, crossover):
            monkeypatch.setattr(module, "layer_path", lambda x, w: path)

    return set_path


def text_of(run):
    out = report.Console(width=260, record=True, file=io.StringIO())
    report.show(run, out)
    return out.export_text()


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_inputs_are_what_they_are_called(kind):
    x, w = kind.make(accuracy.Draw(CPU, 1), kind.m, kind.k, kind.n)
    again, _ = kind.make(accuracy.Draw(CPU, 1), kind.m, kind.k, kind.n)
    other, _ = kind.make(accuracy.Draw(CPU, 2), kind.m, kind.k, kind.n)
    assert x.shape == (kind.m, kind.k)
    assert w.shape == (kind.n, kind.k)
    assert torch.equal(x, again)
    assert not torch.equal(x, other)
    assert x.isfinite().all()
    assert w.isfinite().all()
    assert (x.double() @ w.double().t()).float().isfinite().all()
    if "denormal" in kind.what.split(",")[0]:
        assert x.abs().max() < accuracy.SMALLEST
        assert x.any(1).all()
    if "smallest" in kind.what.split(",")[0]:
        assert accuracy.SMALLEST <= x.abs().min() <= x.abs().max() < 2.5 * accuracy.SMALLEST


def test_inputs_hold_what_was_promised():
    kinds = accuracy.inputs()
    names = [kind.name for kind in kinds]
    assert len(names) == len(set(names))
    assert {kind.k for kind in kinds if kind.what == "normal"} == set(accuracy.DEPTHS)
    assert {kind.k for kind in kinds if kind.what == "all positive"} == set(accuracy.DEPTHS)
    assert {kind.name for kind in accuracy.inputs(quick=True)} < set(names)
    for span in (10, 20, 40, 60):
        assert sum(f"{span} binades" in name and "own scale" not in name for name in names) >= 2


def test_errors_of_a_product():
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    right, wrong = torch.tensor([[3.0, 8.0], [0.0, 0.0]]), torch.tensor([[3.0, 9.0], [0.0, 0.0]])
    found = errors.product_errors({"right": right, "wrong": wrong, "nan": right * math.nan}, a, b)
    assert found["right"] == errors.ProductError(0.0, 0.0, 0.0, 0.0)
    assert found["wrong"].max_abs == 1.0
    assert found["wrong"].relative == pytest.approx(1 / math.sqrt(73))
    assert found["wrong"].rowwise == pytest.approx(1 / (5 * 2))
    assert found["wrong"].componentwise == pytest.approx(1 / 8)
    assert errors.worse_than(found["right"], found["wrong"]) == []
    assert errors.worse_than(found["right"], found["right"]) == []
    assert len(errors.worse_than(found["wrong"], found["right"])) == 2
    assert len(errors.worse_than(found["nan"], found["wrong"])) == 2


def test_an_error_where_nothing_is_multiplied_is_infinite():
    found = errors.product_errors({"wrong": torch.ones(1, 1)}, torch.zeros(1, 2), torch.ones(2, 1))
    assert found["wrong"].rowwise == found["wrong"].componentwise == math.inf


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_product_errors_are_the_same_in_any_slices(rows, monkeypatch):
    a, b = torch.randn(20, 30), torch.randn(30, 10)
    results = {"u": a @ b + 1e-3 * torch.randn(20, 10)}
    whole = errors.product_errors(results, a, b)["u"]
    monkeypatch.setattr(errors, "SLICE_VALUES", 30 * rows)
    part = errors.product_errors(results, a, b)["u"]
    assert vars(part) == pytest.approx(vars(whole))


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_accuracy_of_every_input(kind):
    """Of the split as it is defined, with exact sums, the elementwise error stays under its bound on every input."""
    sgemm, split = accuracy.measure(kind, CPU, seed=3)
    assert [sgemm.variant, split.variant] == [SGEMM, SPLIT]
    assert split.status == sgemm.status == OK
    results_denormal = "results too" in kind.what
    assert split.componentwise_error <= (kind.k + 8) * 2.0**-24
    assert split.relative_error < (1e-2 if "cancelling" in kind.what else 1e-5 if results_denormal else 1e-6)
    if "20 binades" not in kind.what:  # where it depends on the smallest of the random numbers
        # Rows that span much, but whose large elements meet large ones, are the split's own.
        assert split.exact_tiles == (1.0 if kind.what.startswith(("x spans 40", "x spans 60")) else 0.0)


def test_the_share_of_exact_tiles():
    x, w = torch.rand(512, 16) + 0.5, torch.rand(128, 16) + 0.5
    assert accuracy.exact_tiles(x, w) == 0
    w[0, 0] = 1e-20  # lossy, but each row of x has a large element where this row has one
    assert accuracy.exact_tiles(x, w) == 0
    x[0, 0] = math.inf
    assert accuracy.exact_tiles(x, w) == pytest.approx(1 / 4)
    w[64, 0], w[64, 1:] = 1.0, 1e-20
    x[128, 0] = 0.0  # where the only large element of that row is
    assert accuracy.exact_tiles(x, w) == pytest.approx(1 / 4 + 1 / 4 * 1 / 2)


def test_a_worse_split_fails_where_the_layer_takes_it(layer_takes, monkeypatch):
    monkeypatch.setattr(accuracy.ops, "split_matmul", lambda a, b: torch.mm(a, b) * (1 + 1e-4))
    for path, status in ((SGEMM, OK), (SPLIT, FAILED)):
        layer_takes(path)
        _, split = accuracy.measure(SMALL[0], CPU, seed=3)
        assert split.status == status
    run = Run({"device_type": "cuda"}, options={"seed": 3}, rows=[*accuracy.measure(SMALL[0], CPU, seed=3)])
    assert FAILED in split_report.accuracy_markdown(run)
    assert FAILED in text_of(run)
    outcome = next(outcome for outcome in bars.judge_all(run) if isinstance(outcome.bar, bars.ErrorBar))
    assert outcome.reached is False
    assert outcome.note == SMALL[0].name


def product_rows(case, sgemm, split, path=SPLIT, suite=accuracy.SUITE, **times):
    rows = []
    for name, error in ((SGEMM, sgemm), (SPLIT, split)):
        ms = times.get("sgemm_ms" if name == SGEMM else "split_ms")
        rows.append(Row(suite, case, name, ms=ms, path=path, relative_error=error, rowwise_error=error))
        rows[-1].componentwise_error = error
    return rows


@pytest.mark.parametrize(
    ("rows", "value", "reached"),
    [
        ([], None, None),
        (product_rows("a", 1e-6, 3e-7) + product_rows("b", 1e-6, 5e-7), 0.5, True),
        (product_rows("a", 1e-6, 3e-7) + product_rows("b", 1e-6, 2e-6, path=SGEMM), 0.3, True),  # not taken there
        (product_rows("a", 1e-6, 3e-7) + product_rows("b", 1e-6, 2e-6), 2.0, False),
        (product_rows("a", 0.0, 0.0), 0.0, True),
        (product_rows("a", 0.0, 1e-9), math.inf, False),
        ([*product_rows("a", 1e-6, 3e-7), Row("accuracy", "b", OURS, status=ERROR)], None, False),
    ],
)
def test_the_bar_of_the_errors(rows, value, reached):
    found = [outcome for outcome in bars.judge_all(Run(rows=rows)) if isinstance(outcome.bar, bars.ErrorBar)]
    assert len(found) == 2
    for outcome in found:
        assert outcome.reached is reached
        assert outcome.value == (value if value is None else pytest.approx(value))


def test_a_nan_misses_the_bar_of_the_errors():
    rows = product_rows("a", 1e-6, math.nan) + product_rows("b", 1e-6, 1e-7)
    assert [bars.judge(Run(rows=rows), bar).reached for bar in bars.BARS if isinstance(bar, bars.ErrorBar)] == [
        False
    ] * 2


def test_crossover_of_one_line():
    rows = crossover.measure(32, 48, (16, 24), CPU)
    assert [row.case for row in rows] == [crossover.point_name(32, 48, k) for k in (16, 16, 24, 24)]
    for row in rows:
        assert row.status == OK
        assert row.ms > 0
        assert row.relative_error < 1e-6


def test_crossover_table():
    def point(k, **figures):
        return product_rows(crossover.point_name(64, 256, k), suite=crossover.SUITE, **figures)

    rows = [
        *point(32, sgemm=1e-7, split=2e-7, path=SGEMM, sgemm_ms=1.0, split_ms=0.5),  # taken for its exactness
        *point(64, sgemm=1e-7, split=2e-7, path=SPLIT, sgemm_ms=1.0, split_ms=0.5),  # a breach
        *point(128, sgemm=1e-6, split=2e-7, path=SGEMM, sgemm_ms=1.5, split_ms=1.0),  # a loss
        *point(256, sgemm=1e-6, split=2e-7, path=SPLIT, sgemm_ms=1.0, split_ms=1.01),  # no difference
        *point(512, sgemm=1e-6, split=2e-7, path=SPLIT, sgemm_ms=4.0, split_ms=1.0),
        Row(crossover.SUITE, crossover.line_name(64, 1024), OURS, status=ERROR),
    ]
    run = Run({"device_type": "cuda"}, rows=rows)
    shown = split_report.crossover_markdown(run)
    assert "| 64, 256 | (2.00*) | 2.00* | (1.50) | 0.99 | 4.00 |" in shown
    assert "Of 5 sizes the layer takes the slower product at 1, at the worst by 1.50x" in shown
    assert "less exact at 1." in shown
    assert "(2.00*)" in text_of(run)


def test_grid_and_steps():
    options = suites.Options(torch.device("cuda"))
    steps = suites.plan(("kernels", "accuracy", "crossover"), options)
    names = [step.name for step in steps]
    assert len(names) == len(set(names))
    assert {problem.name for problem in products.problems()} <= set(names)
    assert {line[:2] for line in crossover.grid(quick=True)} != set()
    assert (min(crossover.ROWS), max(crossover.ROWS)) == (16, 16384)
    assert suites.plan(("kernels", "accuracy", "crossover"), replace(options, device=CPU)) == []
    assert suites.plan(("accuracy",), replace(options, only="40 binades"))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_split_beside_a_copy(transposed):
    rows = {row.variant: row for row in products.SplitOf("x", 40, 24, transposed).measure(CPU, 0.001)}
    assert set(rows) == {products.SPLIT_ALONE, COPY}
    split = rows[products.SPLIT_ALONE]
    assert split.status == OK
    assert 0 <= split.componentwise_error <= products.HELD_TO
    assert split.limit_ms == rows[COPY].ms
    assert split.work == 2 * 40 * 24 * 4


def test_a_wrong_split_fails(monkeypatch):
    def wrong(matrix, transposed):
        planes, *codes = split_reference(matrix, transposed)
        return planes * 0.999, *codes

    monkeypatch.setattr(products.ops, "split_fp32", wrong)
    rows = products.SplitOf("x", 40, 24).measure(CPU, 0.001)
    assert [row.status for row in rows] == [FAILED, OK]


@pytest.mark.parametrize("order", products.ORDERS)
def test_products_in_every_order(order):
    rows = {row.variant: row for row in products.Product(order, (64, 1040, 48)).measure(CPU, 0.001)}
    assert set(rows) >= {SPLIT, SGEMM, products.TF32, products.FP16}
    assert ({products.ONE_EXACT, products.ALL_EXACT} <= set(rows)) is (order == "x W^T")
    for row in rows.values():
        assert row.ms > 0
        assert row.limit_ms == pytest.approx(3 * rows[products.FP16].ms)
        assert row.relative_error < (1e-2 if row.variant == products.FP16 else 1e-5)
    run = Run(
        {"device_type": "cuda"},
        rows=[replace(row, case=products.Product(order, (16384, 4096, 4096)).name) for row in rows.values()],
    )
    assert f"| {order} 16384x4096->4096 fp32 | {SPLIT} |" in split_report.parts_markdown(run)


def test_a_run_without_these_rows_says_so():
    run = Run()
    tables = (split_report.accuracy_markdown, split_report.crossover_markdown, split_report.parts_markdown)
    assert {table(run) for table in tables} == {NOT_RECORDED}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", accuracy.inputs(quick=True), ids=lambda kind: kind.name)
def test_accuracy_on_the_gpu(kind, monkeypatch):
    monkeypatch.undo()  # the ops themselves
    rows = accuracy.measure(kind, torch.device("cuda"), seed=3)
    assert [row.status for row in rows] == [OK, OK], rows[1].detail
