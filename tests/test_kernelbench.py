"""The KernelBench examples at reduced size, under that harness's rules."""

import importlib.util
from pathlib import Path

import pytest
import torch

HARNESS = Path(__file__).parent.parent / "examples" / "kernelbench" / "run.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def harness():
    spec = importlib.util.spec_from_file_location("kernelbench_run", HARNESS)
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    importlib.sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["bn2d", "gemm_scale_bn"])
def test_model_new_is_correct_under_the_same_seed(harness, name):
    problem = harness.load(name, reduced=True)
    for seed in range(3):
        trial = harness.check(problem, CPU, "fp32", seed)
        assert trial.correct
        assert trial.error_new <= 2 * trial.error + 1e-6


@pytest.mark.parametrize("name", ["bn2d", "gemm_scale_bn"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_halves_are_no_worse_than_the_model(harness, name, precision):
    trial = harness.check(harness.load(name, reduced=True), CPU, precision, 0)
    assert trial.error_new <= 2 * trial.error


@pytest.mark.parametrize("name", ["bn2d", "gemm_scale_bn"])
def test_parameters_are_drawn_in_the_same_order(harness, name):
    problem = harness.load(name, reduced=True)
    old, new = (harness.build(kind, problem, 7).state_dict() for kind in (problem.Model, problem.ModelNew))
    assert list(old) == list(new)
    for key in old:
        assert torch.equal(old[key], new[key]), key


def test_a_wrong_model_fails(harness, monkeypatch, capsys):
    problem = harness.load("bn2d", reduced=True)

    class Wrong(problem.Model):
        def forward(self, x):
            return super().forward(x) + 1e-3

    monkeypatch.setattr(problem, "ModelNew", Wrong)
    assert not harness.check(problem, CPU, "fp32", 0).correct
    monkeypatch.setattr(harness, "load", lambda name, reduced: problem)
    assert harness.main(["bn2d", "--device", "cpu", "--trials", "1", "--calls", "1"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "ms" not in out


def test_full_sizes_are_the_problems(harness):
    bn2d, gemm = harness.load("bn2d", reduced=False), harness.load("gemm_scale_bn", reduced=False)
    assert (bn2d.batch_size, bn2d.features, bn2d.dim1, bn2d.dim2) == (64, 64, 512, 512)
    assert (gemm.batch_size, *gemm.get_init_inputs()) == (16384, 4096, 4096, (4096,))


def test_main_runs_both(harness, capsys):
    assert harness.main(["--device", "cpu", "--trials", "1", "--calls", "1"]) == 0
    out = capsys.readouterr().out
    assert "bn2d" in out
    assert "gemm_scale_bn" in out
