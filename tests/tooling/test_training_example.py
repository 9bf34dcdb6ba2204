"""The training example, shortened: both models of a pair learn the same, step by step."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
SCRIPT = Path(__file__).parents[2] / "examples" / "training" / "train.py"
PAIRS = pytest.mark.parametrize("name", ["MLP", "ResNet"])


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("training_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def settings(example):
    return example.Settings(epochs=5)


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads gain little on small models, and lose much where they wait for a busy core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@PAIRS
@pytest.mark.parametrize("seed", range(3))
def test_both_start_from_the_same_weights(example, name, seed):
    """Bit for bit, so that the random numbers were drawn in the same order, and as many of them."""
    ours = example.build_seeded(name, True, seed)
    after_ours = torch.rand(())
    theirs = example.build_seeded(name, False, seed)
    assert example.same_weights(ours, theirs)
    assert torch.equal(after_ours, torch.rand(()))
    assert not example.same_weights(ours, example.build_seeded(name, False, seed + 1))


@PAIRS
def test_modules_differ_in_the_norms_alone(example, name):
    kinds = [
        {type(m).__module__.split(".")[0] for m in example.build_seeded(name, ours, 0).modules()}
        for ours in (1, 0)
    ]
    assert "cutlass_bn" in kinds[0]
    assert "cutlass_bn" not in kinds[1]


@PAIRS
def test_float32_training_on_the_cpu(example, settings, name):
    """The loss at every step, against torch's training in float32 and in float64.

    Both multiply and convolve by the same functions; ours computes the norms in float64 and rounds
    once. So the two differ by roundings, 2^-24 of a value. A loss of at most 3 has roundings of
    2^-23, and the models are smooth, so that training adds a small factor: 1e-5 is 20 times what
    was seen. Against float64, ours may not be further off than twice what torch's own float32 is.
    """
    cpu = torch.device("cpu")
    pair = example.train_pair(name, example.load_data(cpu), settings)
    ours, theirs = pair[True], pair[False]
    assert example.largest_difference(ours, theirs) < 1e-5
    exact = example.build_seeded(name, False, settings.seed).double()
    exact = example.fit(exact, example.load_data(cpu, torch.float64), settings)
    assert (
        example.largest_difference(ours, exact)
        <= 2 * example.largest_difference(theirs, exact) + 1e-7
    )
    assert abs(ours.test_accuracy - theirs.test_accuracy) <= 0.01
    assert abs(ours.train_accuracy - theirs.train_accuracy) <= 0.01
    assert ours.test_accuracy > 0.95
    assert len(ours.losses) == settings.epochs * (1437 // settings.batch)


@pytest.mark.gpu
@PAIRS
def test_float32_training_on_the_gpu(example, settings, name):
    """Products are made differently, no less exactly than in float32: 100 times the CPU's bound."""
    device = torch.device("cuda")
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        pair = example.train_pair(name, example.load_data(device), settings)
    assert example.largest_difference(pair[True], pair[False]) < 1e-3
    assert abs(pair[True].test_accuracy - pair[False].test_accuracy) <= 0.01
    assert pair[True].test_accuracy > 0.95


@PAIRS
@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_autocast_training(example, name, amp, device):
    """fp16 has a GradScaler. Accuracies agree; losses to ten roundings of 2^-8 or 2^-11."""
    if device == "cpu" and (name, amp) == ("ResNet", "fp16"):
        pytest.skip("fp16 convolutions take minutes on CPUs without an instruction for them")
    dtype = example.AMP_DTYPES[amp]
    settings = example.Settings(epochs=5, amp=dtype)
    pair = example.train_pair(name, example.load_data(torch.device(device)), settings)
    assert example.largest_difference(pair[True], pair[False]) < 10 * torch.finfo(dtype).eps
    assert abs(pair[True].test_accuracy - pair[False].test_accuracy) <= 0.01
    assert pair[True].test_accuracy > 0.95


def test_main_prints_a_table_and_draws(example, tmp_path, capsys):
    plot = tmp_path / "loss.png"
    assert example.main(["--device", "cpu", "--epochs", "1", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    for word in ("MLP", "ResNet", "cutlass_bn", "torch.nn", "same initial weights"):
        assert word in out
    assert plot.stat().st_size > 10_000


def test_unknown_model_is_refused(example, capsys):
    with pytest.raises(SystemExit):
        example.main(["VGG"])
    assert "no model VGG" in capsys.readouterr().err
