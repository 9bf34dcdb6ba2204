"""The benchmark's accuracy suite: its inputs and exceptions, verdicts, tables and bars, with the ops in PyTorch."""

import math
from dataclasses import replace

import pytest
import torch
from product_cases import CPU, product_rows, text_of, use_pytorch_ops

from bench import accuracy, bars, split_report
from bench.records import ERROR, FAILED, OK, OURS, SGEMM, SPLIT, Row, Run
from bench.tables import NOT_RECORDED

SMALL = [replace(kind, m=192, k=min(kind.k, 1024), n=64) for kind in accuracy.inputs(quick=True)]
SMALL_EXCEPTIONS = {kind.what: kind for kind in SMALL if kind.exception}
LARGE_TILE, SMALL_TILE = "split large 128x128 tile", "split small 128x64 tile"  # as explain names them


@pytest.fixture(autouse=True)
def _ops_in_pytorch(monkeypatch):
    use_pytorch_ops(monkeypatch)


@pytest.fixture
def layer_takes(monkeypatch):
    """Sets which product the layer is said to take, and in which tile."""

    def set_path(path, tile=""):
        monkeypatch.setattr(accuracy, "layer_path", lambda x, w: path)
        monkeypatch.setattr(accuracy, "split_tile", lambda x, w: tile)

    return set_path


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_inputs_are_what_they_are_called(kind):
    x, w = kind.make(accuracy.Draw(CPU, 1), kind.m, kind.k, kind.n)
    again, _ = kind.make(accuracy.Draw(CPU, 1), kind.m, kind.k, kind.n)
    others = kind.make(accuracy.Draw(CPU, 2), kind.m, kind.k, kind.n)
    assert x.shape == (kind.m, kind.k)
    assert w.shape == (kind.n, kind.k)
    assert torch.equal(x, again)
    assert not all(map(torch.equal, (x, w), others))
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
    contract, exceptions = ({kind.name for kind in group()} for group in (accuracy.under_contract, accuracy.exceptions))
    assert contract | exceptions == set(names)
    assert not contract & exceptions
    large = {(kind.what, kind.k) for kind in kinds if (kind.m, kind.n) == (8192, 8192)}
    assert len(large) == 7
    assert {k for what, k in large if what in ("normal", "all positive")} == {4096, 16384}
    quick = accuracy.inputs(quick=True)
    assert exceptions < {kind.name for kind in quick}
    assert max(max(kind.m, kind.k, kind.n) for kind in quick) == 4096


def exception_operands(what):
    kind = SMALL_EXCEPTIONS[what]
    return kind.make(accuracy.Draw(CPU, 5), kind.m, kind.k, kind.n)


@pytest.mark.parametrize(
    ("what", "count"),
    [
        ("identity times normal W^T", 1),
        ("one 1.0 in each row of x", 1),
        ("one normal number in each row of x", 1),
        ("4 normal numbers in each row of x", 4),
        ("16 normal numbers in each row of x", 16),
    ],
)
def test_exceptions_of_few_products(what, count):
    x, w = exception_operands(what)
    assert (x.count_nonzero(1) == count).all()
    assert w.all()
    ones = count == 1 and "normal number" not in what
    assert (torch.mm(x, w.t()).double() == x.double() @ w.double().t()).all() == ones  # SGEMM's rounding
    if what.startswith("identity"):
        assert torch.equal(x @ x.t(), torch.eye(len(x)))
    else:
        assert x.count_nonzero(0).max() < len(x) / 4  # all over the columns


def test_diagonals():
    x, w = exception_operands("diagonal times diagonal")
    for matrix in (x, w):
        assert torch.equal(matrix.nonzero(), torch.arange(min(matrix.shape))[:, None].expand(-1, 2))
    u = x.double() @ w.double().t()
    assert torch.equal(u, torch.zeros_like(u).diagonal_scatter(u.diagonal()))
    assert u.diagonal().all()


def test_neighbours_cancel_and_nothing_else():
    x, w = exception_operands("neighbouring terms cancel")
    terms = (x[0] * w).double()
    pairs = terms.unflatten(1, (-1, 2))
    left = pairs.sum(2).abs() / pairs.abs().sum(2)
    assert 2.0**-15 < left.median() < 2.0**-12
    assert left.max() < 2.0**-10
    # The same terms in the other group's order first grow, as the half that takes them away comes last.
    grown = torch.cat([pairs[..., 0], pairs[..., 1]], 1).cumsum(1).abs().amax(1)
    assert (terms.cumsum(1).abs().amax(1) < grown).all()
    assert torch.equal(x[:, ::2], x[:, 1::2])


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_accuracy_of_every_input(kind):
    """Of the split as it is defined, with exact sums, the elementwise error stays under its bound on every input."""
    sgemm, split = accuracy.measure(kind, CPU, seed=3)
    assert [sgemm.variant, split.variant] == [SGEMM, SPLIT]
    assert split.status == sgemm.status == OK
    results_denormal = "results too" in kind.what
    assert split.componentwise_error <= (kind.k + 8) * 2.0**-24
    assert split.relative_error < (1e-2 if "cancel" in kind.what else 1e-5 if results_denormal else 1e-6)
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


def test_an_exception_fails_outside_its_bound_alone(layer_takes, monkeypatch):
    layer_takes(SPLIT, SMALL_TILE)
    kind = SMALL_EXCEPTIONS["one 1.0 in each row of x"]
    for error, status in ((4e-7, OK), (6e-7, FAILED)):  # SGEMM's is 0, 9 * 2^-24 is 5.4e-7
        monkeypatch.setattr(accuracy.ops, "split_matmul", lambda a, b, error=error: torch.mm(a, b) * (1 + error))
        sgemm, split = accuracy.measure(kind, CPU, seed=3)
        assert sgemm.relative_error == 0
        assert split.relative_error == pytest.approx(error, rel=0.2)
        assert split.status == status
        assert split.tile == SMALL_TILE
        assert ("2^-24" in split.detail) is (status == FAILED)
    layer_takes(SGEMM)
    assert accuracy.measure(kind, CPU, seed=3)[1].status == OK


def test_an_input_under_the_contract_has_to_keep_the_bound_too(layer_takes, monkeypatch):
    """Also where SGEMM's error is as large."""
    layer_takes(SPLIT)
    monkeypatch.setattr(accuracy, "worse_than", lambda mine, sgemms: [])
    monkeypatch.setattr(accuracy.ops, "split_matmul", lambda a, b: torch.mm(a, b) * 1.001)
    all_positive = next(kind for kind in SMALL if kind.what == "all positive" and kind.k == 1024)
    _, split = accuracy.measure(all_positive, CPU, seed=3)
    assert split.status == FAILED


def test_the_exceptions_have_a_table_of_their_own():
    def rows(what, sgemm, split, status=OK, tile=SMALL_TILE):
        found = product_rows(accuracy.EXCEPTION + what, sgemm, split)
        found[1].status, found[1].tile = status, tile
        return found

    contract = product_rows("a, 1x64->1", 1e-6, 5e-7)
    contract[1].tile = LARGE_TILE
    exceptions = [
        *rows("b, 1x64->1", 1e-8, 4e-8),
        *rows("c, 1x64->1", 0.0, 5e-8),
        *rows("d, 1x64->1", 0.0, 0.0),
        *rows("e, 1x64->1", 1e-8, 1e-3, FAILED, LARGE_TILE),
        Row(accuracy.SUITE, f"{accuracy.EXCEPTION}f, 1x64->1", OURS, status=ERROR),
    ]
    run = Run({"device_type": "cuda"}, options={"seed": 3}, rows=[*contract, *exceptions])
    table, own = split_report.accuracy_markdown(run), split_report.exceptions_markdown(run)
    heads = [[cell.strip() for cell in line.split("|")[1:7]] for line in table.splitlines() + own.splitlines()]
    assert ["a, 1x64->1", "split", "plain 128x128", "1.0e-06", "5.0e-07", "0.50"] in heads
    assert ["b, 1x64->1", "split", "compensated 128x64", "1.0e-08", "4.0e-08", "4.00"] in heads
    assert ["c, 1x64->1", "split", "compensated 128x64", "0", "5.0e-08", "inf"] in heads
    assert ["d, 1x64->1", "split", "compensated 128x64", "0", "0", "-"] in heads
    assert ["e, 1x64->1", "split", "plain 128x128", "1.0e-08", "1.0e-03", "100000.00 FAILED"] in heads
    assert ["f, 1x64->1", FAILED, "-", "-", "-", "-"] in heads
    for what in "bcdef":
        assert f"| {what}, 1x64->1 |" in own
        assert f"{what}, 1x64->1" not in table
    assert "a, 1x64->1" not in own
    shown = text_of(run)
    assert shown.index("a, 1x64->1") < shown.index("where SGEMM may be the more exact") < shown.index("b, 1x64->1")
    # Neither what is less exact nor what failed there moves a bar.
    for bar in bars.BARS:
        if isinstance(bar, bars.ErrorBar):
            outcome = bars.judge(run, bar)
            assert (outcome.value, outcome.reached, outcome.note) == (0.5, True, "a, 1x64->1")
            assert bars.judge(Run(rows=exceptions), bar).reached is None


def test_records_of_before_have_neither_tiles_nor_exceptions(tmp_path):
    measured = Run({"device_type": "cuda"}, rows=product_rows("a, 1x64->1", 1e-6, 5e-7))
    measured.save(tmp_path / "run.json")
    assert '"tile"' not in (tmp_path / "run.json").read_text()
    run = Run.load(tmp_path / "run.json")
    assert run == measured
    assert "| a, 1x64->1 | split | 1.0e-06 | 5.0e-07 | 0.50 |" in split_report.accuracy_markdown(run)
    assert "tile |" not in split_report.accuracy_markdown(run).lower()
    assert split_report.exceptions_markdown(run) == NOT_RECORDED
    assert "more exact" not in text_of(run)


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


@pytest.mark.gpu
@pytest.mark.parametrize("kind", accuracy.inputs(quick=True), ids=lambda kind: kind.name)
def test_accuracy_on_the_gpu(kind, monkeypatch):
    monkeypatch.undo()  # the ops themselves
    rows = accuracy.measure(kind, torch.device("cuda"), seed=3)
    assert [row.status for row in rows] == [OK, OK], rows[1].detail
    if rows[1].path == SPLIT:
        assert rows[1].tile in (LARGE_TILE, SMALL_TILE)
