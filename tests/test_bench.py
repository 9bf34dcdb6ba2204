"""The benchmark's own logic, on tiny cases: nothing here asserts a speed."""

import io
import json
import math
from dataclasses import replace

import pytest
import torch

from bench import __main__ as command
from bench import bars, cases, documents, peers, plots, report, suites
from bench.cases import BN2D, GEMM_SCALE_BN, Case
from bench.errors import Error, broken_contracts, measure_error, oracle
from bench.records import COMPILE, COPY, EAGER, ERROR, FAILED, GEMM, IEEE, OK, OURS, Row, Run
from bench.timing import Timing, exclusive_times, interleave

CPU = torch.device("cpu")
OPTIONS = suites.Options(CPU, quick=True, seconds=0.001)
TINY = [
    Case(BN2D, (2, 4, 5, 3)),
    Case(BN2D, (2, 4, 5, 3), training=False),
    Case(BN2D, (2, 4, 5, 3), channels_last=True),
    Case(GEMM_SCALE_BN, (16, 8, 12)),  # K and N differ: a transposed shape would show
    Case(GEMM_SCALE_BN, (16, 8, 12), training=False),
    Case(GEMM_SCALE_BN, (64, 32, 16), "bf16"),
]


def wrong_build(run):
    """The usual peers, ours replaced by `run`."""

    def build(case, model, options):
        return {**suites.build_variants(case, model, options), OURS: lambda: peers.Variant(run(model))}

    return build


def text_of(run, width=200):
    out = report.Console(width=width, record=True, file=io.StringIO())
    report.show(run, out)
    return out.export_text()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_every_variant_meets_its_contract(case, device):
    rows = suites.measure("workloads", case, replace(OPTIONS, device=torch.device(device), compile=False))
    variants = {row.variant for row in rows}
    assert variants >= {EAGER, OURS, COPY if case.kind == BN2D else GEMM}
    assert (IEEE in variants) is (case.kind == GEMM_SCALE_BN and case.precision == "fp32" and case.training)
    for row in rows:
        assert row.status == OK, row.detail
        assert row.ms > 0
        assert row.p10 <= row.ms <= row.p90
        if row.variant not in (COPY, GEMM):
            assert 0 <= row.relative_error < 2e-2


@pytest.mark.parametrize("case", TINY[:1] + TINY[3:4], ids=lambda case: case.name)
def test_a_wrong_result_has_no_speed(case):
    rows = suites.measure("workloads", case, OPTIONS, build=wrong_build(lambda model: lambda x: model(x) + 1e-3))
    ours = next(row for row in rows if row.variant == OURS)
    assert ours.status == FAILED
    assert "allowed" in ours.detail
    assert ours.valid_ms is None
    assert ours.rate is None
    assert ours.percent_of_limit is None
    run = Run({"device_type": "cuda"}, rows=rows)
    assert run.speedup(ours, EAGER) is None
    line = next(line for line in text_of(run).splitlines() if OURS in line and FAILED in line)
    assert "x " not in line.split(FAILED)[1].split("e-")[0]
    assert f"**{FAILED}**" in report.markdown(run)


def test_nan_and_unwritten_elements_fail():
    def poisoned(model):
        def run(x):
            y = model(x).clone()
            y[0, 0, 0, 0] = math.nan
            return y

        return run

    rows = suites.measure("workloads", TINY[0], OPTIONS, build=wrong_build(poisoned))
    assert next(row for row in rows if row.variant == OURS).status == FAILED


def test_a_variant_that_raises_is_reported_and_the_others_run():
    def broken(model):
        raise RuntimeError("no kernel image")

    rows = suites.measure("workloads", TINY[0], OPTIONS, build=wrong_build(broken))
    by_name = {row.variant: row for row in rows}
    assert by_name[OURS].status == ERROR
    assert "no kernel image" in by_name[OURS].detail
    assert by_name[EAGER].status == OK


def test_wrong_running_statistics_fail():
    case = TINY[0]
    model = peers.eager_model(case, CPU)
    x = peers.random_input(case, CPU)
    with torch.no_grad():
        stepped = peers.variants(case, model, compile=False)[EAGER]()
        good = measure_error(stepped.run(x), oracle(case, model, x), stepped.bn)
        stepped.bn.running_var *= 1.01
        bad = measure_error(stepped.run(x), oracle(case, model, x), stepped.bn)
    assert broken_contracts(good, good, "fp32") == []
    assert any("running statistics" in reason for reason in broken_contracts(bad, good, "fp32"))


@pytest.mark.parametrize("step", [1, 3, 100])
def test_oracle_is_the_same_in_any_slices(step, monkeypatch):
    case = TINY[3]
    model, x = peers.eager_model(case, CPU), peers.random_input(case, CPU)
    with torch.no_grad():
        whole = model.double()(x.double())
        model.bn.reset_running_stats()
        monkeypatch.setattr("bench.errors.SLICE_VALUES", step * x.shape[0])
        parts = torch.cat([part.y for part in oracle(case, model, x)], 1)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("error", "precision", "good"),
    [
        (Error(1e-5, 1e-6, 5e-5), "fp32", True),
        (Error(1e-5, 1e-6, 2e-4), "fp32", False),  # leaves allclose
        (Error(1e-5, 9e-5, 5e-5), "fp32", False),  # inside it, but far worse than eager
        (Error(1e-5, 1e-6, 5e-5, state=1e-3), "fp32", False),
        (Error(1.0, 4e-5, 1.0), "tf32", True),  # TF32 has no absolute bound
        (Error(1.0, 4e-5, 3e-2), "bf16", True),  # beyond 1e-2, where eager is as well
        (Error(1.0, 4e-5, 5e-2), "bf16", False),
        (Error(math.nan, math.nan, math.nan), "tf32", False),
    ],
)
def test_contracts(error, precision, good):
    eager = Error(1e-5, 2e-5, 2e-2, 1e-7)
    assert (broken_contracts(error, eager, precision) == []) is good


def test_suites_hold_what_they_promise():
    names = {case.name for case in cases.workloads()}
    gemm = {*bars.GEMM_TRAIN.values(), *bars.GEMM_EVAL.values(), *bars.FP32_OTHERS}
    assert {bars.LARGE, bars.LARGE_EVAL, *gemm} <= names
    assert cases.workloads()[0].name == bars.GEMM_TRAIN["fp32"]  # the documents' tables lead with it
    assert bars.MIDDLE in {case.name for case in cases.sweep(quick=True)}
    assert set(bars.GEMM_TRAIN.values()) <= {case.name for case in cases.kernels(quick=True)}
    for suite in (cases.workloads, cases.sweep, cases.kernels):
        assert {replace(c, compile=True) for c in suite(quick=True)} <= set(suite())
    overhead = {row.case for row in suites.overhead(replace(OPTIONS, quick=True))}
    assert set(bars.TINY.values()) <= overhead


def test_a_case_of_two_suites_runs_once():
    steps = suites.plan(("workloads", "sweep"), replace(OPTIONS, device=torch.device("cuda"), quick=False))
    assert [step.name for step in steps] == list(dict.fromkeys(case.name for case in cases.workloads() + cases.sweep()))


def test_tf32_switch_is_put_back():
    before = torch.get_float32_matmul_precision()
    with cases.matmul_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_interleave_moves_the_first_call_on():
    order = []
    timings = interleave({n: lambda i, n=n: order.append(n) for n in "ab"}, CPU, 0.0, min_rounds=3)
    assert order[4:] == ["a", "b", "b", "a", "a", "b"]  # after two rounds of warm-up
    assert timings["a"].samples == 3
    assert Timing.of([3.0]).median == 3.0


def test_a_kernel_that_starts_early_to_wait_counts_from_its_turn():
    kernels = [("gemm", 0.0, 100.0), ("finalise", 60.0, 105.0), ("normalise", 110.0, 150.0), ("gemm", 150.0, 250.0)]
    assert exclusive_times(kernels) == {"gemm": [0.1, 0.1], "finalise": [0.005], "normalise": [0.04]}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>(...)", suites.FUSED),
        ("_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiii", suites.FUSED),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", GEMM),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x128>(...)", GEMM),
        ("void cutlass_bn::linear_bn::split_rows_kernel<...>(cutlass_bn::linear_bn::SplitSource, ...)", "split"),
        ("void cutlass_bn::linear_bn::column_maxima_kernel<4>(...)", "split"),
        ("void cutlass_bn::linear_bn::exact_kernel<128, cutlass_bn::linear_bn::ExactMoments>(...)", "exact tiles"),
        ("void cutlass_bn::finalize_kernel<true>(cutlass_bn::FinalizeParams)", "finalise"),
        ("void cutlass_bn::normalize_kernel<float>(cutlass_bn::NormalizeParams)", "normalise"),
        ("void cutlass_bn::stats_nchw_kernel<float>(cutlass_bn::StatsParams)", "moments"),
        ("void cutlass_bn::batch_norm::resident_kernel<float, ...>(...)", "on chip"),
    ],
)
def test_kernel_roles(kernel, expected):
    assert suites.role(kernel) == expected


@pytest.mark.gpu
def test_kernels_of_a_call_are_told_apart():
    options = replace(OPTIONS, device=torch.device("cuda"))
    rows = {row.variant: row for row in suites.time_kernels(Case(GEMM_SCALE_BN, (256, 128, 128), "bf16"), options)}
    assert {"finalise", "normalise", suites.CUBLAS} <= set(rows)
    assert all(row.ms > 0 for row in rows.values())
    for sizes, expected in (((4, 16, 16, 16), {"moments", "finalise", "normalise"}), ((4, 16, 32, 32), {"on chip"})):
        assert {row.variant for row in suites.time_kernels(Case(BN2D, sizes), options)} == expected


def recorded_run():
    """As a GPU run would leave it: every case and variant at a made-up time, and one wrong result."""
    run = Run({"device_type": "cuda", "device": "a GPU", "torch": "2"}, {"copy": 4200.0, "fp16": 800.0})
    judged, swept = cases.workloads(), cases.sweep()
    for case in {case.name: case for case in judged + swept}.values():
        for variant, ms in ((EAGER, 8.0), (COMPILE, 3.0), (OURS, 2.5), (COPY if case.kind == BN2D else GEMM, 2.0)):
            work, unit = case.work
            row = Row("workloads" if case in judged else "sweep", case.name, variant, ms=ms, p10=ms, p90=ms, samples=9)
            row.limit_ms, row.work, row.unit = 2.0, work, unit
            row.max_abs_error, row.relative_error = 1e-6, 1e-7
            run.rows.append(row)
    for case in cases.kernels():
        for label, ms in ((suites.FUSED, 1.03), (suites.CUBLAS, 1.0), ("finalise", 0.009)):
            run.rows.append(Row("kernels", f"kernels {case.name}", label, "kernel", ms, ms, ms, 9))
    wrong = run.find(bars.GEMM_EVAL["bf16"], OURS)
    wrong.status = FAILED
    return run


def test_json_round_trip(tmp_path):
    run = recorded_run()
    path = tmp_path / "deep" / "run.json"
    run.save(path)
    assert Run.load(path) == run
    data = json.loads(path.read_text())
    data["format"] = 0
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="expected format"):
        Run.load(path)


def test_bars():
    outcomes = {outcome.bar.what: outcome for outcome in bars.judge_all(recorded_run())}
    verdicts = {what: outcome.reached for what, outcome in outcomes.items()}
    assert verdicts[f"{bars.LARGE}, time over compile's"] is True
    assert verdicts[f"{bars.LARGE}, faster than eager"] is True
    assert verdicts[f"{bars.MIDDLE}, time"] is False
    assert verdicts[f"{bars.GEMM_EVAL['bf16']}, time over gemm's"] is False  # wrong, however fast
    assert verdicts["finalise kernel, bf16"] is False
    assert verdicts[f"{bars.GEMM_TRAIN['fp32']}, time"] is True
    assert verdicts[f"{bars.GEMM_TRAIN['fp32']}, faster than eager"] is False
    assert None in verdicts.values()  # overhead and accuracy were not measured
    moments = next(outcome for what, outcome in outcomes.items() if what.startswith("moments in the epilogue, bf16"))
    assert moments.value == pytest.approx(3.0)
    assert moments.reached is True


def test_plots_are_written(tmp_path):
    written = plots.write(recorded_run(), tmp_path / "images")
    assert {path.stem for path in written} == set(plots.PLOTS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert plots.write(Run(), tmp_path) == []


def test_commands_on_a_recorded_run(tmp_path, capsys):
    path = tmp_path / "run.json"
    recorded_run().save(path)
    for arguments in (["show"], ["show", "--markdown"], ["bars"], ["bars", "--markdown"]):
        assert command.main([arguments[0], str(path), *arguments[1:]]) == 0
        assert capsys.readouterr().out
    assert command.main(["plot", str(path), "--out", str(tmp_path)]) == 0
    assert command.main(["show", str(tmp_path / "none.json")]) == 2


def test_a_run_without_a_gpu_says_so(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["workloads", "--quick", "--device", "cpu", "--seconds", "0.001", "--only", "bn2d", "--json", str(path)]
    assert command.main(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert report.NO_SPEED in out
    assert "H200" in out
    run = Run.load(path)
    assert not run.on_gpu
    assert {row.status for row in run.rows} == {OK}
    assert command.main(["show", str(path), "--markdown"]) == 0
    assert report.NO_SPEED in capsys.readouterr().out


@pytest.mark.parametrize(("document", "marker"), documents.TABLES)
def test_documents_show_the_recorded_run(document, marker):
    """Between their markers stands what `python -m bench documents` writes there."""
    render = documents.TABLES[document, marker]
    assert documents.shown(document, marker) == render(Run.load(command.RECORDED)).strip()


def test_documents_are_rewritten(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    for name in {name for name, _ in documents.TABLES}:
        (tmp_path / name).write_text((command.ROOT / name).read_text())
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    run = recorded_run()
    run.save(tmp_path / "run.json")
    assert command.main(["documents", str(tmp_path / "run.json")]) == 0
    assert documents.write(run) == []
    assert documents.shown("README.md", "measured") == report.markdown(run)
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match="expected one pair of markers measured"):
        documents.write(run)


def test_a_run_is_resumed(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["workloads", "--quick", "--device", "cpu", "--seconds", "0.001", "--json", str(path), "--resume"]
    assert command.main([*arguments, "--only", "bn2d", "--seed", "7"]) == 0
    begun = Run.load(path)
    assert begun.options["steps"]
    assert command.main([*arguments, "--only", "bn2d"]) == 0  # nothing is left to do
    assert Run.load(path).rows == begun.rows
    assert command.main([*arguments, "--only", "tf32 eval"]) == 0
    run = Run.load(path)
    assert run.rows[: len(begun.rows)] == begun.rows
    assert len(run.options["steps"]) == len(begun.options["steps"]) + 1
    assert run.options["seed"] == 7
    run.environment["device"] = "another"
    run.save(path)
    assert command.main(arguments) == 2
    assert "can't be resumed" in capsys.readouterr().err
