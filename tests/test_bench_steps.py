"""The benchmark of training steps: its oracle, its verdicts, its memory figure and its tables."""

import io
import json
import math
import time
from dataclasses import replace

import pytest
import torch

from bench import __main__ as command
from bench import bars, cases, errors, gradients, peers, report, step_report, steps, suites
from bench.cases import BN2D, GEMM_SCALE_BN, Case
from bench.records import COMPILE, COPY, EAGER, ERROR, FAILED, GEMM, OK, OURS, OURS_COMPILED, RECORDED, Row, Run
from bench.tables import NOT_RECORDED

CPU = torch.device("cpu")
TINY = [
    Case(BN2D, (2, 4, 5, 3)),
    Case(BN2D, (2, 4, 5, 3), channels_last=True),
    Case(BN2D, (4, 8, 6, 6), "bf16"),
    Case(GEMM_SCALE_BN, (16, 8, 12)),  # K and N differ: a transposed gradient would show
    Case(GEMM_SCALE_BN, (64, 32, 16), "bf16"),
]
BOTH = [TINY[0], TINY[3]]


def by_name(case):
    return case.name


def build(case, model):
    return peers.variants(case, model, compile=False)


def measure(case, device=CPU, build=build):
    return {row.variant: row for row in steps.measure(case, device, 0.001, {}, build)}


def build_compiled(case, model):
    """Eager and ours, compiled too."""
    builders = peers.variants(case, model, stepped=True)
    return {name: builders[name] for name in (EAGER, OURS, OURS_COMPILED)}


def with_ours(change, name=OURS):
    """The usual peers, ours (or another that is judged) replaced by eager after `change` of its model."""

    def build_changed(case, model):
        def ours():
            variant = build(case, model)[EAGER]()
            change(variant.model)
            return variant

        return {**build(case, model), name: ours}

    return build_changed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", TINY, ids=by_name)
def test_gradients_of_a_step_meet_their_contract(case, device):
    rows = measure(case, torch.device(device))
    assert list(rows) == [EAGER, OURS]
    expected = {"dx", "dgamma", "dbeta"} | ({"dW", "dscale", "dbias"} if case.kind == GEMM_SCALE_BN else set())
    for row in rows.values():
        assert row.case == steps.step_name(case)
        assert row.status == OK, row.detail
        assert row.p10 <= row.ms <= row.p90
        assert set(row.gradient_errors) == expected
        assert all(0 <= error < (5e-2 if case.precision == "bf16" else 1e-5) for error in row.gradient_errors.values())
        assert (row.peak_bytes is not None) is (device == "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", BOTH, ids=by_name)
def test_peak_memory_of_a_step(case):
    large = replace(case, shape=(1024, 512, 2048) if case.kind == GEMM_SCALE_BN else (16, 32, 64, 64))
    y, x = 4 * math.prod(large.output_shape), 4 * math.prod(large.input_shape)
    for row in measure(large, torch.device("cuda")).values():
        assert row.peak_bytes >= y + x  # y and dx
        assert row.peak_bytes < 20 * (y + x)


@pytest.mark.parametrize("values", [16, 48, 10**6])
@pytest.mark.parametrize("case", BOTH, ids=by_name)
def test_the_oracle_is_autograd_in_float64(case, values, monkeypatch):
    """In any slices of channels."""
    monkeypatch.setattr(errors, "SLICE_VALUES", values)
    model = peers.eager_model(case, CPU)
    x, dy = peers.random_input(case, CPU).requires_grad_(), torch.randn(case.output_shape)
    wide, x64 = peers.eager_model(case, CPU).double(), x.detach().double().requires_grad_()
    wide.load_state_dict(model.state_dict())
    steps.step(wide, wide, x64, dy.double())
    found = gradients.gradient_errors({"wide": gradients.gradients_of(wide, x64)}, case, model, x, dy)["wide"]
    assert set(found) == set(gradients.gradients_of(wide, x64))
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("case", BOTH, ids=by_name)
@pytest.mark.parametrize("name", gradients.NAMES)
def test_a_wrong_gradient_is_found(case, name):
    model = peers.eager_model(case, CPU)
    x, dy = peers.random_input(case, CPU).requires_grad_(), torch.randn(case.output_shape)
    steps.step(model, model, x, dy)
    right = {key: gradient.clone() for key, gradient in gradients.gradients_of(model, x).items()}
    if name not in right:
        pytest.skip("no such parameter")
    wrong = {**right, name: right[name] + 1e-3 * x.grad.abs().max()}
    nan = {**right, name: torch.full_like(right[name], math.nan)}
    found = gradients.gradient_errors({"right": right, "wrong": wrong, "nan": nan}, case, model, x, dy)
    assert gradients.broken_contracts(found["right"], found["right"]) == []
    for result in ("wrong", "nan"):
        (broken,) = gradients.broken_contracts(found[result], found["right"])
        assert broken.startswith(f"error of {name} ")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", BOTH, ids=by_name)
def test_ours_is_stepped_compiled_too(case, device):
    rows = measure(case, torch.device(device), build_compiled)
    assert list(rows) == [EAGER, OURS, OURS_COMPILED]
    compiled = rows[OURS_COMPILED]
    assert compiled.status == OK, compiled.detail
    assert compiled.ms > 0
    assert set(compiled.gradient_errors) == set(rows[OURS].gradient_errors)
    assert all(0 <= error < 1e-5 for error in compiled.gradient_errors.values())
    assert compiled.limit_ms == rows[OURS].limit_ms


@pytest.mark.parametrize("case", BOTH, ids=by_name)
def test_the_compiled_step_compiles_once(case):
    """Neither another input nor the gradients of the step before compile anything again."""
    torch.compiler.reset()
    variant = build_compiled(case, peers.eager_model(case, CPU))[OURS_COMPILED]()
    inputs, dy = [peers.random_input(case, CPU).requires_grad_() for _ in range(2)], torch.ones(case.output_shape)
    steps.step(variant.run, variant.model, inputs[0], dy)
    with torch.compiler.set_stance("fail_on_recompile"):
        for x in (*inputs, *inputs):
            steps.step(variant.run, variant.model, x, dy)


def test_ours_is_compiled_in_steps_alone():
    case, options = TINY[0], suites.Options(torch.device("cuda"))
    model = peers.eager_model(case, CPU)
    assert OURS_COMPILED not in suites.build_variants(case, model, options)
    assert OURS_COMPILED in suites.build_variants(case, model, options, stepped=True)
    assert OURS_COMPILED not in suites.build_variants(case, model, replace(options, compile=False), stepped=True)
    assert OURS_COMPILED not in suites.build_variants(case, model, replace(options, device=CPU), stepped=True)


@pytest.mark.parametrize("name", [OURS, OURS_COMPILED])
@pytest.mark.parametrize("case", BOTH, ids=by_name)
def test_a_wrong_step_has_no_speed(case, name):
    def double(model):
        next(model.parameters()).register_hook(lambda grad: 2 * grad)

    rows = measure(case, build=with_ours(double, name))
    assert {row.variant for row in rows.values() if row.status != OK} == {name}
    assert rows[name].status == FAILED
    assert "error of d" in rows[name].detail
    assert rows[name].valid_ms is None


def test_a_step_that_raises_is_reported_and_the_others_run():
    def broken(model):
        raise RuntimeError("no kernel image")

    rows = measure(TINY[0], build=with_ours(broken))
    assert rows[OURS].status == ERROR
    assert "no kernel image" in rows[OURS].detail
    assert rows[EAGER].ms > 0


def test_gradients_do_not_add_up():
    model, x = torch.nn.BatchNorm2d(3), torch.rand(2, 3, 4, 4)
    again = steps.repeated(model, x)
    again()
    first = model.weight.grad.clone()
    again()
    torch.testing.assert_close(model.weight.grad, first)


def test_steps_hold_what_the_bars_judge():
    assert {case.name for case in bars.STEPS} == {case.name for case in cases.steps()}
    assert {case.name for case in cases.steps(quick=True)} < {case.name for case in cases.steps()}
    overhead = {row.case for row in suites.overhead(suites.Options(CPU, quick=True))}
    assert {*bars.TINY.values(), bars.TINY_LINEAR_STEP} <= overhead
    planned = suites.plan(("workloads", "steps"), suites.Options(torch.device("cuda")))
    assert {steps.step_name(case) for case in bars.STEPS} <= {step.name for step in planned}


def recorded_run():
    run = Run({"device_type": "cuda", "device": "a GPU"}, options={"took": {"steps": 40.0, "sweep": 2.0}})
    for case in cases.steps():
        figures = (EAGER, 8.0, 4 << 30), (COMPILE, 3.0, 3 << 30), (OURS, 0.5, 2 << 30), (OURS_COMPILED, 0.52, 2 << 30)
        for variant, ms, peak in figures:
            found = dict.fromkeys(gradients.NAMES, 1e-7)
            row = Row(steps.SUITE, steps.step_name(case), variant, ms=ms, gradient_errors=found, peak_bytes=peak)
            run.rows.append(row)
    return run


def test_bars_of_steps():
    run = recorded_run()
    verdicts = {outcome.bar.what: outcome.reached for outcome in bars.judge_all(run)}
    large = steps.step_name(next(iter(bars.STEPS)))
    assert verdicts[f"{large}, time"] is True
    assert verdicts[f"{large}, peak memory over eager's"] is True
    run.find(large, OURS).peak_bytes = 4 << 30  # as much is not less
    run.find(large, OURS).ms = 11.0
    verdicts = {outcome.bar.what: outcome.reached for outcome in bars.judge_all(run)}
    assert verdicts[f"{large}, time"] is False
    assert verdicts[f"{large}, peak memory over eager's"] is False
    assert verdicts["step bn2d 64x256x56x56 channels_last fp32, time"] is False  # 0.5 of 0.42 ms
    assert not any(what.startswith("step bn2d") and "memory" in what for what in verdicts)


def test_bars_of_compiled_use():
    run = recorded_run()
    names = [steps.step_name(case) for case in bars.STEPS]
    run.find(names[1], OURS_COMPILED).ms = 0.53  # of 0.5 eagerly
    run.find(names[2], OURS_COMPILED).status = ERROR
    run.rows.remove(run.find(names[3], OURS_COMPILED))
    judged = {outcome.bar.what: outcome for outcome in bars.judge_all(run)}
    outcomes = [judged[f"{name}, compiled use over eager use"] for name in names]
    assert outcomes[0].value == pytest.approx(1.04)
    assert [outcome.reached for outcome in outcomes] == [True, False, False, None, *[True] * (len(names) - 4)]
    assert outcomes[3].note == f"no row for {OURS_COMPILED}"


def test_the_record_is_judged_whatever_rows_it_has():
    run = Run.load(RECORDED)
    for name in (steps.step_name(case) for case in bars.STEPS):
        outcome = next(bars.judge(run, bar) for bar in bars.BARS if bar.what == f"{name}, compiled use over eager use")
        missing = run.find(name, OURS_COMPILED) is None
        assert (outcome.note == f"no row for {OURS_COMPILED}") is (outcome.reached is None) is missing
    assert "bn2d 64x64x512x512 fp32" in step_report.details_markdown(run)


def test_tables_of_steps(tmp_path):
    run = recorded_run()
    run.find("step bn2d 16x64x256x256 fp32", OURS).status = FAILED
    shown = step_report.markdown(run)
    assert "| bn2d 64x64x512x512 fp32 | 8.000 | 3.000 | **0.5000** | 16.00x | 6.00x | 2,048 (4,096) |" in shown
    assert f"| bn2d 16x64x256x256 fp32 | 8.000 | 3.000 | **{FAILED}** | - | - |" in shown
    details = step_report.details_markdown(run)
    assert details.count("\n| bn2d 64x64x512x512 fp32 |") == 4
    assert f"\n| bn2d 64x64x512x512 fp32 | {OURS_COMPILED} | 0.5200 | 15.38x | 5.77x |" in details
    assert OURS_COMPILED not in shown  # the short table has a line a case
    assert step_report.details_markdown(Run()) == step_report.markdown(Run()) == NOT_RECORDED
    out = report.Console(width=220, record=True, file=io.StringIO())
    report.show(run, out)
    text = out.export_text()
    assert "took: steps 40 s, sweep 2 s; 42 s in all" in text
    assert "2,048" in text
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run


def test_the_limit_of_a_step():
    """Of the peer in the same rounds, which is not stepped itself."""
    for case, peer, factor in ((TINY[0], COPY, 2.5), (TINY[4], GEMM, 3.0)):
        rows = measure(case)
        assert peer not in rows
        assert rows[OURS].limit_ms > 0
        assert rows[OURS].work == pytest.approx(factor * case.work[0])


def test_a_run_in_pieces(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.json"
    arguments = ["steps", "--quick", "--device", "cpu", "--seconds", "0.001", "--json", str(path), "--resume"]
    seconds = iter(range(0, 100_000, 40))  # of a clock that every look moves on
    monkeypatch.setattr(command.time, "monotonic", lambda: next(seconds))
    assert command.main([*arguments, "--minutes", "3"]) == 0
    out = capsys.readouterr().out
    assert "steps are left for --resume" in out
    begun = Run.load(path)
    assert 0 < len(begun.options["steps"]) < len(cases.steps(quick=True))
    monkeypatch.setattr(command.time, "monotonic", time.perf_counter)
    assert command.main(arguments) == 0
    assert "left for --resume" not in capsys.readouterr().out
    run = Run.load(path)
    assert len(run.options["steps"]) == len(cases.steps(quick=True))
    assert run.options["took"]["steps"] > begun.options["took"]["steps"]
    assert json.loads(path.read_text())["options"]["took"]
