"""The benchmark of the fp32 products: its errors, parts, crossover and tables, with the ops' arithmetic in PyTorch.

The accuracy suite is test_bench_accuracy.py's.
"""

import math
from dataclasses import replace

import pytest
import torch
from product_cases import CPU, product_rows, text_of, use_pytorch_ops
from split_cases import split_reference

from bench import crossover, errors, products, split_report, suites
from bench.records import COPY, ERROR, FAILED, OK, OURS, SGEMM, SPLIT, Row, Run
from bench.tables import NOT_RECORDED


@pytest.fixture(autouse=True)
def _ops_in_pytorch(monkeypatch):
    use_pytorch_ops(monkeypatch)


def test_errors_of_a_product():
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    right, wrong = torch.tensor([[3.0, 8.0], [0.0, 0.0]]), torch.tensor([[3.0, 9.0], [0.0, 0.0]])
    found = errors.product_errors({"right": right, "wrong": wrong, "nan": right * math.nan}, a, b)
    assert found["right"] == errors.ProductError(0.0, 0.0, 0.0, 0.0, 0.0)
    assert found["wrong"].max_abs == 1.0
    assert found["wrong"].relative == pytest.approx(1 / math.sqrt(73))
    assert found["wrong"].rowwise == pytest.approx(1 / (5 * 2))
    assert found["wrong"].componentwise == pytest.approx(1 / 8)
    assert found["wrong"].of_bound == pytest.approx(1 / 8 / (9 * 2.0**-24))  # 4 * 0 does not count
    assert errors.outside_bound(found["right"]) == []
    assert len(errors.outside_bound(found["wrong"])) == len(errors.outside_bound(found["nan"])) == 1
    assert errors.worse_than(found["right"], found["wrong"]) == []
    assert errors.worse_than(found["right"], found["right"]) == []
    assert len(errors.worse_than(found["wrong"], found["right"])) == 2
    assert len(errors.worse_than(found["nan"], found["wrong"])) == 2


def test_an_error_where_nothing_is_multiplied_is_infinite():
    found = errors.product_errors({"wrong": torch.ones(1, 1)}, torch.zeros(1, 2), torch.ones(2, 1))
    assert found["wrong"].rowwise == found["wrong"].componentwise == math.inf
    assert errors.outside_bound(found["wrong"])


@pytest.mark.parametrize(("places", "inside"), [(0, True), (1, True), (40, False)])
def test_the_bound_of_a_denormal_result_allows_its_rounding(places, inside):
    """1.25 last places, which no float is, and a result some places off."""
    a, b = torch.full((1, 64), 2.0**-100), torch.full((64, 1), 1.25 * 2.0**-55)
    u = torch.tensor([[(1 + places) * 2.0**-149]])
    error = errors.product_errors({"u": u}, a, b)["u"]
    assert error.componentwise > 64 * 2.0**-24
    assert (errors.outside_bound(error) == []) is inside


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_product_errors_are_the_same_in_any_slices(rows, monkeypatch):
    a, b = torch.randn(20, 30), torch.randn(30, 10)
    results = {"u": a @ b + 1e-3 * torch.randn(20, 10)}
    whole = errors.product_errors(results, a, b)["u"]
    monkeypatch.setattr(errors, "SLICE_VALUES", 30 * rows)
    part = errors.product_errors(results, a, b)["u"]
    assert vars(part) == pytest.approx(vars(whole))


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
    tables = (
        split_report.accuracy_markdown,
        split_report.exceptions_markdown,
        split_report.crossover_markdown,
        split_report.parts_markdown,
    )
    assert {table(run) for table in tables} == {NOT_RECORDED}
