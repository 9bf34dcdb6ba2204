"""The benchmark's own logic, on tiny cases: nothing here asserts a speed."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import oracle
import pytest
import torch
from torch.overrides import TorchFunctionMode

from bench import __main__ as command
from bench import cases, errors, peers, records, report, suites
from bench.cases import BN2D, EVAL, GEMM_SCALE_BN, STEP, Case, Options
from bench.records import COMPILE, EAGER, FAILED, LIMITS, OK, OURS, OURS_COMPILED, Row, Run
from bench.timing import Timing, interleave

CPU = torch.device("cpu")
OPTIONS = Options(CPU, quick=True, seconds=0.001)
NORM = Case(BN2D, (2, 4, 5, 3))
LAYER = Case(GEMM_SCALE_BN, (16, 8, 12))  # K and N differ: a transposed shape would show
FORWARDS = [
    NORM,
    LAYER,
    replace(NORM, mode=EVAL),
    replace(LAYER, mode=EVAL),
    Case(BN2D, (4, 8, 6, 6), "bf16", channels_last=True),
    Case(GEMM_SCALE_BN, (64, 32, 16), "bf16"),
]
STEPS = [replace(case, mode=STEP) for case in (NORM, LAYER, *FORWARDS[-2:])]
ADDED = replace(STEPS[2], activation="relu", residual=True)
STEPS += [replace(ADDED, residual=False), ADDED]


@pytest.fixture(autouse=True)
def _one_thread():
    """Two wait for each other on a busy machine, and the cases are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def with_ours(monkeypatch, change):
    """Ours is eager, changed: change(variant) gives another, or raises."""
    usual = peers.variants

    def variants(case, model, compile):
        builders = usual(case, model, compile)
        return {**builders, OURS: lambda: change(builders[EAGER]())}

    monkeypatch.setattr(peers, "variants", variants)


@pytest.mark.parametrize("case", FORWARDS + STEPS, ids=lambda case: case.name)
def test_every_variant_meets_its_contract(case, device):
    options = replace(OPTIONS, device=torch.device(device), compile=False)
    rows = {row.variant: row for row in suites.measure("workloads", case, options)}
    step, gemm = case.mode == STEP, case.kind == GEMM_SCALE_BN
    assert {EAGER, OURS} <= set(rows)
    assert any(name in rows for name in LIMITS) is not step
    assert (records.IEEE in rows) is (gemm and case.precision == "fp32" and case.mode == "train")
    for row in rows.values():
        assert row.status == OK, row.detail
        assert 0 < row.p10 <= row.ms <= row.p90
        assert (row.peak_bytes is not None) is (step and device == "cuda")
        if step:
            assert len(row.gradient_errors) == (6 if gemm else 3 + case.residual)
        found = row.gradient_errors.values() if step else [row.relative_error]
        if row.variant not in LIMITS:
            assert all(0 <= error < (5e-2 if case.precision == "bf16" else 1e-5) for error in found)


@pytest.mark.gpu
@pytest.mark.parametrize("case", STEPS[:2], ids=lambda case: case.name)
def test_ours_is_stepped_compiled_too(case):
    rows = suites.measure("steps", case, replace(OPTIONS, device=torch.device("cuda")))
    assert {row.variant for row in rows} == {EAGER, COMPILE, OURS, OURS_COMPILED}
    assert {row.status for row in rows} == {OK}


def poisoned(y):
    y = y.clone()
    y.view(-1)[0] = math.nan
    return y


def drifting(variant):
    def run(x):
        y = variant.run(x)
        peers.batch_norm_of(variant.model).running_var *= 1.01
        return y

    return peers.Variant(run, variant.model)


def doubled(variant):
    next(variant.model.parameters()).register_hook(lambda gradient: 2 * gradient)
    return variant


def raising(variant):
    raise RuntimeError("no kernel image")


WRONG = {
    "off": (lambda v: peers.Variant(lambda x: v.run(x) + 1e-3, v.model), NORM, "of y"),
    "NaN": (lambda v: peers.Variant(lambda x: poisoned(v.run(x)), v.model), LAYER, "nan"),
    "state": (drifting, NORM, "of running_var"),
    "gradient": (doubled, STEPS[0], "of dgamma"),
    "weight's": (doubled, STEPS[1], "of dscale"),
    "raising": (raising, STEPS[0], "no kernel image"),
}


@pytest.mark.parametrize(("change", "case", "why"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_has_no_speed(change, case, why, monkeypatch):
    with_ours(monkeypatch, change)
    rows = {row.variant: row for row in suites.measure("workloads", case, OPTIONS)}
    ours = rows[OURS]
    assert ours.status == (records.ERROR if change is raising else FAILED)
    assert why in ours.detail
    assert ours.valid_ms is ours.rate is ours.percent_of_limit is None
    assert rows[EAGER].status == OK
    run = Run({"device_type": "cuda"}, rows=list(rows.values()))
    for table in (*report.tables(run), report.summary(run, "", run.cases())):
        assert ours.status in report.as_markdown(table)
    assert not report.faster(rows, OURS, EAGER)


@pytest.mark.parametrize("case", [NORM, LAYER, *STEPS[:2], ADDED], ids=lambda case: case.name)
def test_exact_results_are_those_of_the_oracle(case):
    model = peers.eager_model(case, CPU)
    x, dy = peers.random_input(case, CPU)
    wide = peers.eager_model(case, CPU).double()
    wide.load_state_dict(model.state_dict())
    bn = peers.batch_norm_of(wide)
    bn.forward = lambda z: oracle.batch_norm(z, bn.weight, bn.bias, bn.eps).y
    wide_x = x.detach().double().requires_grad_(case.mode == STEP)
    results = peers.Variant(wide, wide).results(wide_x, None if dy is None else dy.double())
    found = errors.measure(results, *errors.exact(case, model, x, dy))
    assert set(found) == set(results)
    names = set(found) - {"running_mean", "running_var"}  # the oracle has no state
    assert max(found[name].relative for name in names) < 1e-12


@pytest.mark.parametrize(("error", "good"), [(3.9e-5, True), (9e-5, False), (math.nan, False)])
def test_the_contract(error, good):
    row, eager = Row("", "", OURS), errors.Error(2e-5, 1.0)
    errors.judge(row, {"y": errors.Error(error, 1.0)}, {"y": eager})
    assert (row.status == OK) is good


def test_interleave_moves_the_first_call_on():
    order = []
    timings = interleave({n: lambda i, n=n: order.append(n) for n in "ab"}, CPU, 0.0)
    assert order[4:] == list("abbaabbaab")  # after two rounds of warm-up
    assert timings["a"].samples == 5
    assert Timing.of([1.0, 3.0, 2.0]).ms == 2.0


def test_suites():
    on_gpu = replace(OPTIONS, device=torch.device("cuda"), quick=False)
    names = [item.name for _, item in suites.plan(suites.SUITES, on_gpu)]
    assert len(names) == len(set(names))  # a case of two suites runs once
    assert set(report.IN_README) <= set(names)
    assert {suite for suite, _ in suites.plan(suites.SUITES, OPTIONS)} == {
        name for name, suite in suites.SUITES.items() if suite.on_cpu
    }
    for suite in suites.SUITES.values():
        every = {item.name for item in suite.items(False)}
        assert suite.on_cpu == "" or {item.name for item in suite.items(True)} <= every
    assert suites.plan(["sweep"], replace(on_gpu, only="28x28"))


def test_cpu_suite_is_of_two_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    rows = suites.measure_on_cpu("cpu", NORM, replace(OPTIONS, device=torch.device("cuda")))
    assert counts == [2, 7]
    assert [row.variant for row in rows] == [EAGER, OURS]
    run = Run(rows=rows)
    assert report.NO_SPEED not in report.headline(run)
    assert "x eager" in report.summary(run, "", run.cases()).header


class OnCpu(TorchFunctionMode):
    """What asks for a CUDA device gets the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def moved(value):
            return CPU if isinstance(value, torch.device) and value.type == "cuda" else value

        kwargs = {name: moved(value) for name, value in (kwargs or {}).items()}
        return function(*map(moved, args), **kwargs)


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def shrunk(items, quick):
    """A few of a suite's items, small."""
    few = items(True)[::3]
    if hasattr(few[0], "reduced"):
        return [case.reduced() for case in few]
    if isinstance(few[0], suites.accuracy.Input):
        return [replace(kind, m=24, k=16, n=8) for kind in few]
    return few


@pytest.fixture
def stand_in_gpu(monkeypatch):
    """The CPU in its place, and all cases small: what runs on a GPU alone runs."""
    properties = SimpleNamespace(name="Stand-in", multi_processor_count=1, L2_cache_size=1 << 10)
    stubs = {
        "Event": Event,
        "get_device_properties": lambda _: properties,
        **dict.fromkeys(("_sleep", "synchronize", "empty_cache"), lambda *_: None),
        "reset_peak_memory_stats": lambda: None,
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda: 0),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(command, "measure_ceilings", lambda *_: {"copy": 4000.0, "fp16": 800.0})
    monkeypatch.setitem(suites.accuracy.PRODUCTS, "split_matmul", torch.mm)
    monkeypatch.setattr(suites.accuracy, "GRID", ((8, 16),) * 3)
    monkeypatch.setattr(suites.accuracy, "POINT_SECONDS", 0.0)
    monkeypatch.setattr(suites.models, "STEPS", 1)
    for name, suite in suites.SUITES.items():
        few = partial(shrunk, suite.items)
        monkeypatch.setitem(suites.SUITES, name, suite._replace(items=few))
    with OnCpu():
        yield


def test_a_run_on_a_gpu(stand_in_gpu, tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["all", "--quick", "--device", "cuda", "--seconds", "0.001", "--json", str(path)]
    assert command.main(arguments) == 0
    run = Run.load(path)
    assert {row.suite for row in run.rows} == set(suites.SUITES)
    assert {row.status for row in run.rows} == {OK}
    assert {row.variant for row in run.rows} >= {COMPILE, OURS_COMPILED}
    limited = "workloads", "steps", "layers", "sweep"
    assert all(row.limit_ms for row in run.rows if row.suite in limited)
    out = capsys.readouterr().out
    assert "Stand-in" in out
    assert report.NO_SPEED not in out
    assert "crossover" in out


def test_json_round_trip(tmp_path):
    row = Row("steps", "step", OURS, ms=1.5, gradient_errors={"dx": 1e-7}, peak_bytes=3)
    run, path = Run({"device": "a GPU"}, rows=[row]), tmp_path / "deep" / "run.json"
    run.save(path)
    assert Run.load(path) == run
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(ValueError, match="expected format"):
        Run.load(path)


def recorded_cells(data):
    """How each row's line begins and what else is in it, from the JSON alone."""
    rows = [row for row in data["rows"] if row["suite"] != "crossover"]
    eager = {(row["suite"], row["case"]): row for row in rows if row["variant"] == "eager"}
    before = None
    for row in rows:
        new, before = row["case"] != before, row["case"]
        begins = [row["case"], row["variant"]] if new else [row["variant"]]
        if row["status"] != "ok":
            yield begins, []
            continue
        if row["metric"] == "error":
            begins += [f"{row[name]:.1e}" for name in ("max_abs_error", "relative_error")]
        else:
            begins += [format(row[name], "#.4g") for name in ("ms", "p10", "p90")]
            peer = eager.get((row["suite"], row["case"]), {"status": "missing"})
            if peer["status"] == "ok" and row["variant"] not in ("copy", "gemm"):
                begins.append(f"{peer['ms'] / row['ms']:.2f}x")
        peak = row.get("peak_bytes")
        yield begins, [f"{peak / 2**20:,.0f}"] if peak else []


def recorded_ratios(data):
    """The crossover's lines, in the same way."""
    rows = [row for row in data["rows"] if row["suite"] == "crossover"]
    found = {(row["case"], row["variant"]): row for row in rows}
    lines = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        sgemm, split = found[case, "SGEMM"], found[case, "split_matmul"]
        star = "*" if split["relative_error"] > sgemm["relative_error"] else ""
        ratio = f"{sgemm['ms'] / split['ms']:.2f}{star}"
        taken = split["path"] == "split_matmul"
        size = " ".join(case.split()[1:-1])  # crossover M=16 N=256 K=32
        lines.setdefault(size, [size]).append(ratio if taken else f"({ratio})")
    return [(line, []) for line in lines.values()]


def test_the_record_is_shown(capsys):
    data = json.loads(records.RECORDED.read_text())
    for form in ([], ["--markdown"]):
        assert command.main(["show", *form]) == 0
        out = capsys.readouterr().out
        assert data["environment"]["device"] in out
        assert "…" not in out
        lines = [re.split(r" *\| *| {2,}", line) for line in out.splitlines()]
        lines = [[cell for cell in line if cell not in ("", "-")] for line in lines]
        for expected in (recorded_cells(data), recorded_ratios(data)):
            rest = iter(lines)  # what is shown is in the record's order
            for cells, others in expected:
                found = next((line for line in rest if line[: len(cells)] == cells), [])
                assert {*cells, *others} <= {*found}, cells


def test_readme_shows_the_record(tmp_path, monkeypatch):
    """What `python -m bench readme` writes."""
    run, shown = Run.load(records.RECORDED), report.in_readme()
    table = report.as_markdown(report.readme_table(run))
    if shown.startswith("| what |"):
        assert shown == table
    assert len(report.readme_table(run).lines) == len(report.IN_README) <= 10
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    report.README.write_text("a\n<!-- measured -->\nold\n<!-- /measured -->\nb\n")
    assert command.main(["readme"]) == 0
    assert report.in_readme() == table
    report.README.write_text("no markers")
    assert command.main(["readme"]) == 2


def test_charts_are_drawn(tmp_path):
    assert command.main(["plot", "--out", str(tmp_path)]) == 0
    suites = [s for s in ("models", "workloads", "sweep") if Run.load(records.RECORDED).cases(s)]
    assert {path.stem for path in tmp_path.glob("*.png")} == set(suites)
    assert {path.read_bytes()[:4] for path in tmp_path.glob("*.png")} == {b"\x89PNG"}


def test_a_demo_without_a_gpu(capsys):
    arguments = ["workloads", "--quick", "--summary", "--device", "cpu", "--seconds", "0.001"]
    assert command.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40  # make adds a few
    assert max(map(len, lines)) <= 120
    assert report.NO_SPEED in lines
    assert sum("train" in line or "eval" in line for line in lines) == 8 + 8


def test_a_run_in_pieces(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.json"
    arguments = ["steps", "--quick", "--seconds", "0.001", "--json", str(path), "--resume"]
    arguments += ["--device", "cpu"]
    seconds = iter(range(0, 100_000, 40))  # of a clock that every look moves on
    monkeypatch.setattr(command.time, "monotonic", lambda: next(seconds))
    assert command.main([*arguments, "--minutes", "3", "--seed", "7"]) == 0
    assert "steps are left for --resume" in capsys.readouterr().out
    begun = Run.load(path)
    assert 0 < len(begun.options["steps"]) < len(cases.steps(True))
    assert command.main(arguments) == 0
    assert "left for --resume" not in capsys.readouterr().out
    run = Run.load(path)
    assert run.rows[: len(begun.rows)] == begun.rows
    assert len(run.options["steps"]) == len(cases.steps(True))
    assert run.options["seed"] == 7
    data = json.loads(path.read_text())
    data["environment"]["device"] = "another"
    path.write_text(json.dumps(data))
    assert command.main(arguments) == 2
    assert "can't be resumed" in capsys.readouterr().err
