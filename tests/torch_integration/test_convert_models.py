"""Whole models of torchvision and timm, converted: torch's outputs, gradients and state dicts."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from vision import timm, torchvision

import cutlass_bn
from cutlass_bn import convert, explain, revert

MODELS: dict[str, Callable[..., nn.Module]] = {
    "torchvision resnet18": torchvision.models.resnet18,
    "torchvision resnet50": torchvision.models.resnet50,
    "torchvision densenet": functools.partial(
        torchvision.models.DenseNet, block_config=(2, 2), num_init_features=16
    ),
    "torchvision mobilenet": torchvision.models.mobilenet_v3_small,
    "timm resnet": functools.partial(timm.create_model, "resnet26"),
    "timm efficientnet": functools.partial(timm.create_model, "efficientnet_b0"),
}
# How many BatchNorms are followed by an activation or an addition in one call.
FUSED = {
    "torchvision resnet18": 17,
    "torchvision resnet50": 49,
    "timm resnet": 25,
    "timm efficientnet": 33 + 9,
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    for module in model.modules():  # as an untrained network of this depth is too sensitive
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.uniform_(module.bias, -0.1, 0.1)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *model.buffers()]


def assert_same_step(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    for actual, expected in zip(step(ours, x), step(theirs, x), strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * scale + 1e-12)


@pytest.mark.parametrize("trace", [False, True], ids=["plain", "trace"])
@pytest.mark.parametrize("name", MODELS)
def test_converted(name, trace):
    theirs = seeded(MODELS[name]).double()  # in which two ways of computing don't drift apart
    ours = convert(copy.deepcopy(theirs), trace=trace)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert_same_step(ours.train(), theirs.train(), x)
    assert_same_step(ours.eval(), theirs.eval(), x)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    expected = ours(x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(other(x), expected)
    report = explain(ours)
    for module_name, module in ours.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module_name in report
    if trace and name in FUSED:
        norms = [n for n, m in ours.named_modules() if isinstance(m, nn.BatchNorm2d)]
        assert sum(report[n].startswith("fused") for n in norms) == FUSED[name]
    revert(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    torch.testing.assert_close(ours(x), expected)


@pytest.mark.parametrize("name", ["torchvision resnet18", "timm efficientnet"])
def test_float32_against_float64(name):
    """No further from the truth than torch's own float32 is."""
    exact = seeded(MODELS[name]).double()
    theirs = copy.deepcopy(exact).float()
    ours = convert(copy.deepcopy(theirs), trace=True)
    x = torch.randn(4, 3, 64, 64)
    truth = exact(x.double())
    error, bar = ((model(x) - truth).abs().max().item() for model in (ours, theirs))
    assert error <= 2 * bar + 1e-6


BUILT = {
    "torchvision resnet18": ("BatchNorm2d", torchvision.models.resnet18),
    "timm resnet": ("BatchNorm2d", functools.partial(timm.create_model, "resnet18")),
    "timm efficientnet": (
        "BatchNormAct2d",
        functools.partial(timm.create_model, "efficientnet_b0"),
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_built_with_our_norm_layer(name):
    norm, make = BUILT[name]
    theirs = seeded(make).double()
    ours = make(norm_layer=getattr(cutlass_bn, norm)).double()
    ours.load_state_dict(theirs.state_dict())
    assert "cutlass_bn" in {type(m).__module__.split(".")[0] for m in ours.modules()}
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    convert(ours, trace=True)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert_same_step(ours, theirs, x)
    revert(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]


def test_autocast_keeps_torchs_dtypes():
    theirs = seeded(torchvision.models.resnet18)
    ours = convert(copy.deepcopy(theirs), trace=True)
    dtypes: list[list[torch.dtype]] = []
    for model in (ours, theirs):
        found: list[torch.dtype] = []
        for block in (*model.layer1, *model.layer2):
            block.register_forward_hook(lambda *args, found=found: found.append(args[-1].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            found.append(model(torch.randn(2, 3, 64, 64)).dtype)
        dtypes.append(found)
    assert dtypes[0] == dtypes[1]


def test_feature_extraction_of_a_converted_model():
    from torchvision.models.feature_extraction import create_feature_extractor

    theirs = torchvision.models.resnet18().eval()
    models = convert(copy.deepcopy(theirs), trace=True), theirs
    extractors = [create_feature_extractor(m, ["layer1.0.bn2", "layer2"]) for m in models]
    x = torch.randn(1, 3, 64, 64)
    found, expected = (extractor(x) for extractor in extractors)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_synchronised_later():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(
        convert(torchvision.models.resnet18(), trace=True)
    )
    assert isinstance(model.layer1[0].bn1, nn.SyncBatchNorm)
    theirs = torchvision.models.resnet18()
    theirs.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model.eval()(x), theirs.eval()(x))


def test_training_example(monkeypatch):
    """Both ways of examples/training/resnet.py see the same losses."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples" / "training")
    resnet = importlib.import_module("resnet")
    options = ["--model", "resnet18", "--steps", "2", "--batch", "4", "--pixels", "64"]
    losses = {
        mode: resnet.main([*options, "--device", "cpu", "--mode", mode])
        for mode in ("eager", "convert")
    }
    torch.testing.assert_close(losses["convert"][0], losses["eager"][0], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(losses["convert"], losses["eager"], rtol=0.05, atol=0.05)
