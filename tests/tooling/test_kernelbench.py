"""The KernelBench examples at reduced size, under that harness's rules."""

import importlib.util
from pathlib import Path

import pytest
import torch

HARNESS = Path(__file__).parents[2] / "examples" / "kernelbench" / "run.py"
CPU = torch.device("cpu")
# What check() needs at full size, and some to spare. bn2d: nine times x's 4 GiB, with x, the
# float64 y, both models' y and the temporaries of allclose alive: a card of 80 GB has it, one of 40
# GB has not.
FREE_GIB = {"bn2d": 44, "gemm_scale_bn": 8}


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
    old, new = (
        harness.build(kind, problem, 7).state_dict() for kind in (problem.Model, problem.ModelNew)
    )
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bn2d", "gemm_scale_bn"])
@pytest.mark.parametrize("seed", [42, 43])
def test_full_sizes_are_correct_in_fp32(harness, name, seed):
    """The recorded benchmark's sizes by the rule itself, and ours at least as near to float64."""
    torch.cuda.empty_cache()  # of what earlier tests left
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < FREE_GIB[name]:
        pytest.skip(f"needs {FREE_GIB[name]} GiB, {free:.0f} are free")
    trial = harness.check(harness.load(name, reduced=False), torch.device("cuda"), "fp32", seed)
    torch.cuda.empty_cache()
    assert trial.correct
    # Off Hopper both models multiply by SGEMM, and which of them rounds worse is chance.
    by_chance = name == "gemm_scale_bn" and torch.cuda.get_device_capability() != (9, 0)
    assert trial.error_new <= trial.error * (1.5 if by_chance else 1.0)


def test_main_runs_both(harness, capsys):
    assert harness.main(["--device", "cpu", "--trials", "1", "--calls", "1"]) == 0
    out = capsys.readouterr().out
    assert "bn2d" in out
    assert "gemm_scale_bn" in out
