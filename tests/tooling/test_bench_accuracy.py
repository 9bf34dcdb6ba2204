"""The benchmark of fp32 products, with the split GEMM's arithmetic in PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from split_cases import left_to_exact_kernel, split_reference

from bench import accuracy, errors, report
from bench.cases import Options
from bench.records import FAILED, OK, SGEMM, SPLIT, Row, Run

OPTIONS = Options(torch.device("cpu"), seed=3)
SMALL = [replace(i, m=192, k=min(i.k, 1024), n=64) for i in accuracy.inputs(quick=True)]


def split_product(a, b):
    """a @ b of the planes, its sums exact; plain float32 where a row can't be held."""
    sides = []
    for matrix in (a, b.t()):
        planes, exponents, _ = split_reference(matrix)
        sides.append((*planes.double(), torch.exp2(-exponents.double())[:, None]))
    (a_hi, a_lo, a_scale), (b_hi, b_lo, b_scale) = sides
    u = (a_hi @ b_hi.t() + (a_hi @ b_lo.t() + a_lo @ b_hi.t()) / 4096) * a_scale * b_scale.t()
    return torch.where(left_to_exact_kernel(a, b.t()), torch.mm(a, b), u.float())


@pytest.fixture
def split(monkeypatch):
    """Sets the split's product, and which product the layer is said to take."""

    def set_product(product, path=SPLIT):
        monkeypatch.setitem(accuracy.PRODUCTS, SPLIT, product)
        monkeypatch.setattr(accuracy, "layer_plan", lambda x, w: (path, "a tile"))

    return set_product


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_accuracy_of_every_input(kind, split):
    split(split_product, SPLIT if kind.k >= 64 else SGEMM)
    sgemm, ours = accuracy.measure("accuracy", kind, OPTIONS)
    assert (sgemm.variant, ours.variant, ours.tile) == (SGEMM, SPLIT, "a tile")
    assert ours.status == OK, ours.detail
    assert 0 <= sgemm.relative_error < (1e-2 if "cancel" in kind.what else 1e-4)
    assert accuracy.measure("accuracy", kind, OPTIONS)[1] == ours  # of the same seed


@pytest.mark.gpu
@pytest.mark.parametrize("kind", accuracy.inputs(quick=True), ids=lambda kind: kind.name)
def test_accuracy_on_the_gpu(kind):
    rows = accuracy.measure("accuracy", kind, replace(OPTIONS, device=torch.device("cuda")))
    assert [row.status for row in rows] == [OK, OK], rows[1].detail


@pytest.mark.parametrize(
    ("what", "error", "path", "status"),
    [
        ("normal", 1e-4, SPLIT, FAILED),
        ("normal", 1e-4, SGEMM, OK),  # not what the layer takes
        ("normal", math.nan, SPLIT, FAILED),
        ("diagonal times diagonal", 4e-7, SPLIT, OK),  # SGEMM's is less; 9 * 2^-24 is 5.4e-7
        ("diagonal times diagonal", 6e-7, SPLIT, FAILED),
    ],
)
def test_verdicts(what, error, path, status, split):
    split(lambda a, b: (a.double() @ b.double() * (1 + error)).float(), path)
    kind = next(kind for kind in SMALL if kind.what == what)
    assert accuracy.measure("accuracy", kind, OPTIONS)[1].status == status


def test_errors_of_a_product():
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    right, wrong = (torch.tensor([[3.0, y], [0.0, 0.0]]) for y in (8.0, 9.0))
    found = errors.of_products({"right": right, "wrong": wrong, "nan": right * math.nan}, a, b)
    assert found["right"] == errors.ProductError(0.0, 0.0, 0.0, 0.0)
    # 4 * 0 does not count in the bound
    expected = 1.0, 1 / math.sqrt(73), 1 / (5 * 2), 1 / 8 / (9 * 2.0**-24)
    assert found["wrong"] == pytest.approx(expected)
    assert math.isnan(found["nan"].of_bound)


def test_the_share_of_exact_tiles():
    x, w = torch.rand(512, 16) + 0.5, torch.rand(128, 16) + 0.5
    assert accuracy.exact_tiles(x, w) == 0
    w[0, 0] = 1e-20  # lossy, but each row of x has a large element where this row has one
    assert accuracy.exact_tiles(x, w) == 0
    x[0, 0] = math.inf
    assert accuracy.exact_tiles(x, w) == pytest.approx(1 / 4)


def test_crossover_table():
    rows = []
    for k, ms, error, path in ((32, 0.5, 2e-6, SGEMM), (64, 0.25, 1e-7, SPLIT)):
        common = {"suite": "crossover", "case": f"crossover M=64 N=256 K={k}", "path": path}
        rows.append(Row(variant=SGEMM, ms=1.0, relative_error=1e-6, **common))
        rows.append(Row(variant=SPLIT, ms=ms, relative_error=error, **common))
    rows.append(Row("crossover", "crossover M=64 N=1024", "cutlass_bn", status="error"))
    table = report.crossover(Run(rows=rows))
    assert table.header == ["M, N", "K=32", "K=64"]
    assert table.lines == [["M=64 N=256", "(2.00*)", "4.00"]]
