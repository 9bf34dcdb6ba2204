"""BatchNorm2d as a drop-in for torch's: construction, state, errors, and where modules go."""

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cutlass_bn
from cutlass_bn import BatchNorm2d

OPTIONS = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"eps": 1e-3, "momentum": 0.3},
]


def pair(device: str = "cpu", channels: int = 4, **options) -> tuple[BatchNorm2d, nn.BatchNorm2d]:
    ours, theirs = (cls(channels, **options).to(device) for cls in (BatchNorm2d, nn.BatchNorm2d))
    if theirs.affine:
        nn.init.uniform_(theirs.weight, 0.5, 2.0)
        nn.init.uniform_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_several_steps_are_torchs(options, device):
    ours, theirs = pair(device, **options)
    assert repr(ours) == repr(theirs)
    for training in (True, True, False, True, False):
        x = torch.randn(3, 4, 5, 6, device=device)
        torch.testing.assert_close(
            ours.train(training)(x), theirs.train(training)(x), rtol=1e-4, atol=1e-5
        )
        assert_same_state(ours, theirs)


FLIPS = {
    "stop tracking": lambda m: setattr(m, "track_running_stats", False),
    "start tracking without buffers": lambda m: setattr(m, "track_running_stats", True),
    "cumulative": lambda m: setattr(m, "momentum", None),
    "momentum 0": lambda m: setattr(m, "momentum", 0.0),
    "eps": lambda m: setattr(m, "eps", 0.1),
    "no counter": lambda m: setattr(m, "num_batches_tracked", None),
    "no buffers": lambda m: (setattr(m, "running_mean", None), setattr(m, "running_var", None)),
    "no bias": lambda m: setattr(m, "bias", None),
    "half": lambda m: m.half(),
}


@pytest.mark.parametrize("flip", FLIPS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_flags_flipped_after_construction(flip, training, device):
    ours, theirs = pair(device, track_running_stats=flip != "start tracking without buffers")
    dtype = torch.float16 if flip == "half" else torch.float32
    for module in (ours, theirs):
        module(torch.randn(8, 4, 4, 4, device=device))
        FLIPS[flip](module.train(training))
    theirs.load_state_dict(ours.state_dict())  # the two drew different batches
    for _ in range(2):
        x = torch.randn(3, 4, 5, 6, device=device, dtype=dtype)
        tolerance = 1e-2 if flip == "half" else 1e-5
        torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=tolerance, atol=tolerance)
    if flip == "half":
        assert ours.num_batches_tracked.dtype == torch.int64


def test_momentum_none_is_the_mean_over_batches(device):
    module = BatchNorm2d(2, momentum=None).to(device)
    x = torch.randn(5, 8, 2, 3, 3, device=device)
    for batch in x:
        module(batch)
    assert module.num_batches_tracked.item() == 5
    torch.testing.assert_close(module.running_mean, x.mean((0, 1, 3, 4)), rtol=1e-5, atol=1e-6)


def test_is_a_batch_norm():
    module = BatchNorm2d(3)
    assert isinstance(module, nn.BatchNorm2d)
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(module))[0]
    assert type(converted) is nn.SyncBatchNorm
    assert converted.weight is module.weight


def test_loads_old_state_without_a_counter():
    state = nn.BatchNorm2d(3).state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    module = BatchNorm2d(3)
    module.num_batches_tracked += 7
    module.load_state_dict(state)
    assert module.num_batches_tracked.item() == 7


def test_copies_and_pickles(device):
    module, _ = pair(device)
    x = torch.randn(3, 4, 5, 6, device=device)
    module(x)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(saved, weights_only=False),
    ]
    expected = module(x)
    for other in copies:
        assert torch.equal(other(x), expected)
        assert other.num_batches_tracked.item() == 2
    assert module.num_batches_tracked.item() == 2


ERRORS = {
    "three dimensions": (lambda m: m(torch.randn(2, 4, 5)), r"expected 4D input \(got 3D input\)"),
    "two dimensions": (lambda m: m(torch.randn(2, 4)), r"expected 4D input \(got 2D input\)"),
    "one value per channel": (
        lambda m: m(torch.randn(1, 4, 1, 1)),
        "Expected more than 1 value per channel",
    ),
    "too few channels": (lambda m: m(torch.randn(2, 3, 5, 5)), None),
    "too many channels": (lambda m: m(torch.randn(2, 5, 5, 5)), None),
    "weight of another size": (lambda m: F_batch_norm(m, weight=torch.ones(3)), None),
    "integers": (lambda m: m(torch.ones(2, 4, 5, 5, dtype=torch.int64)), None),
    "running_mean alone": (lambda m: F_batch_norm(m, running_var=None), None),
    "no running statistics": (
        lambda m: F_batch_norm(m, running_mean=None, running_var=None, training=False),
        None,
    ),
    "eps 0": (lambda m: F_batch_norm(m, eps=0.0), None),
}


def F_batch_norm(module: nn.BatchNorm2d, **changes):
    function = cutlass_bn.functional.batch_norm if isinstance(module, BatchNorm2d) else F.batch_norm
    arguments = {
        name: getattr(module, name)
        for name in ("running_mean", "running_var", "weight", "bias", "eps")
    }
    return function(torch.randn(2, 4, 5, 5), **{**arguments, "training": True, **changes})


@pytest.mark.parametrize("mistake", ERRORS)
def test_errors_are_torchs_and_change_nothing(mistake):
    call, message = ERRORS[mistake]
    ours, theirs = pair()
    with pytest.raises(Exception) as theirs_raised:  # noqa: PT011
        call(theirs)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(type(theirs_raised.value), match=message):
        call(ours)
    for name, value in before.items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_empty_batch(training, device):
    module = BatchNorm2d(4).to(device).train(training)
    assert module(torch.empty(0, 4, 5, 6, device=device)).shape == (0, 4, 5, 6)
    assert torch.equal(module.running_mean, torch.zeros(4, device=device))
    assert torch.equal(module.running_var, torch.ones(4, device=device))
    assert module.num_batches_tracked.item() == training


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_inference_mode_and_no_grad(training, device):
    module, _ = pair(device)
    x = torch.randn(3, 4, 5, 6, device=device)
    expected = copy.deepcopy(module).train(training)(x)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = copy.deepcopy(module).train(training)(x)
        assert not y.requires_grad
        assert torch.equal(y, expected)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_compile(training, grad, device):
    module, _ = pair(device)
    eager = copy.deepcopy(module).train(training)
    compiled = torch.compile(module.train(training), fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        for shape in ((3, 4, 5, 6), (2, 4, 7, 6)):  # the second makes sizes dynamic
            x = torch.randn(shape, device=device)
            torch.testing.assert_close(compiled(x), eager(x))
    assert_same_state(module, eager)
    if grad:
        compiled(x).square().sum().backward()
        eager(x).square().sum().backward()
        torch.testing.assert_close(module.weight.grad, eager.weight.grad)


@pytest.mark.slow
def test_compile_with_inductor(device):
    module, _ = pair(device)
    eager = copy.deepcopy(module)
    x = torch.randn(3, 4, 5, 6, device=device, requires_grad=True)
    y = torch.compile(module, fullgraph=True)(x)
    torch.testing.assert_close(y, eager(x), rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x)
    (expected,) = torch.autograd.grad(eager(x).pow(3).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
    assert module.num_batches_tracked.item() == 1


def test_float64(device):
    ours, theirs = pair(device)
    x = torch.randn(3, 4, 5, 6, device=device, dtype=torch.float64)
    torch.testing.assert_close(ours.double()(x), theirs.double()(x))


def test_contract_at_a_large_mean(device):
    x = torch.randn(16, 4, 20, 20, device=device) + 1e4
    oracle.assert_y_keeps_contract(BatchNorm2d(4).to(device)(x).detach(), oracle.batch_norm(x))


def test_fork_after_import(device):
    """The import must not initialise CUDA: a forked child could not use it any more."""
    script = f"""
        import os, sys
        import cutlass_bn, torch
        assert not torch.cuda.is_initialized()
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            y = cutlass_bn.BatchNorm2d(3).to("{device}")(torch.randn(2, 3, 4, 4, device="{device}"))
            os._exit(0 if bool(y.isfinite().all()) else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)
