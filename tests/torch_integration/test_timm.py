"""BatchNormAct2d: timm's on our kernels, and known to timm."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from vision import timm

import cutlass_bn
from cutlass_bn import BatchNormAct2d, explain
from cutlass_bn.modules import batch_norm, batch_norm_act

Theirs = timm.layers.BatchNormAct2d

# timm's arguments, and the activation that is fused.
OPTIONS: list[tuple[dict, str | None]] = [
    ({}, "relu"),
    ({"act_layer": nn.LeakyReLU}, "leaky_relu"),
    ({"act_layer": nn.LeakyReLU, "act_kwargs": {"negative_slope": 0.3}}, None),
    ({"act_layer": nn.SiLU, "inplace": False}, "silu"),
    ({"act_layer": "gelu"}, "gelu"),
    ({"act_layer": "gelu_tanh"}, None),
    ({"act_layer": "hard_swish"}, None),
    ({"act_layer": None}, None),
    ({"apply_act": False}, None),
    ({"drop_layer": functools.partial(nn.Dropout2d, 0.0)}, None),
    ({"affine": False, "eps": 1e-3, "momentum": 0.01}, "relu"),
    ({"track_running_stats": False, "dtype": torch.float64}, "relu"),
    ({"momentum": None}, "relu"),
]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(("options", "fused"), OPTIONS, ids=str)
def test_is_timms(options, fused, training, monkeypatch):
    made = []
    real = batch_norm.batch_norm_with_counter
    monkeypatch.setattr(
        batch_norm, "batch_norm_with_counter", lambda *args: made.append(args[-2]) or real(*args)
    )
    ours, theirs = (
        cls(4, **copy.deepcopy(options)).train(training) for cls in (BatchNormAct2d, Theirs)
    )
    x = torch.randn(3, 4, 5, 6, dtype=options.get("dtype"))
    results = []
    for module in (ours, theirs):
        input = x.clone().requires_grad_()
        y = module(input)
        gradients = torch.autograd.grad(y.square().sum(), [input, *module.parameters()])
        results.append((y, *gradients, *module.buffers()))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert made == [fused]
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_is_a_subclass_with_timms_signature():
    assert issubclass(BatchNormAct2d, Theirs)
    assert inspect.signature(BatchNormAct2d) == inspect.signature(Theirs)
    assert cutlass_bn.BatchNormAct2d is batch_norm_act.BatchNormAct2d
    assert type(pickle.loads(pickle.dumps(BatchNormAct2d(3)))) is BatchNormAct2d


def test_timm_is_not_imported_before():
    script = """
        import sys, cutlass_bn
        assert not any(name.split(".")[0] in ("timm", "torchvision") for name in sys.modules)
        assert not hasattr(cutlass_bn, "BatchNormAct3d")
        cutlass_bn.convert(__import__("torch").nn.BatchNorm2d(3))
        assert "timm" not in sys.modules
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=120)


def test_act_is_a_live_attribute():
    ours, theirs = BatchNormAct2d(4).eval(), Theirs(4).eval()
    x = torch.randn(3, 4, 5, 6)
    for act in (nn.Tanh(), nn.SiLU(), nn.Identity()):
        ours.act = theirs.act = act
        torch.testing.assert_close(ours(x), theirs(x))
    seen = []
    ours.act.register_forward_hook(lambda *args: seen.append(args))
    ours(x)
    assert len(seen) == 1


def test_timm_takes_it_as_norm_layer():
    for norm_layer in (BatchNormAct2d, functools.partial(BatchNormAct2d, eps=1e-3)):
        model = timm.create_model("efficientnet_b0", norm_layer=norm_layer)
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert norms
        assert {type(m) for m in norms} == {BatchNormAct2d}
        assert type(norms[0].act) is nn.SiLU
    made = timm.layers.create_norm_act_layer(BatchNormAct2d, 4, act_layer=nn.SiLU)
    assert type(made) is BatchNormAct2d
    assert type(made.act) is nn.SiLU


def test_the_trap_of_class_names():
    """timm looks an unknown class up by its name: BatchNorm2d becomes its own BatchNormAct2d."""
    model = timm.create_model("efficientnet_b0", norm_layer=cutlass_bn.BatchNorm2d)
    assert {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {Theirs}
    cutlass_bn.convert(model)
    assert {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {BatchNormAct2d}


def test_timm_freezes_and_converts_it():
    model = nn.Sequential(BatchNormAct2d(4, act_layer=nn.SiLU))
    x = torch.randn(3, 4, 5, 6)
    expected = copy.deepcopy(model).eval()(x)
    frozen = timm.layers.freeze_batch_norm_2d(copy.deepcopy(model))
    assert type(frozen[0]) is timm.layers.FrozenBatchNormAct2d
    torch.testing.assert_close(frozen(x), expected, rtol=1e-4, atol=1e-5)
    synchronised = timm.layers.convert_sync_batchnorm(model)
    assert type(synchronised[0]) is timm.layers.SyncBatchNormAct
    assert type(synchronised[0].act) is nn.SiLU


def test_timm_extracts_features():
    model = timm.create_model("resnet18", norm_layer=cutlass_bn.BatchNorm2d).eval()
    extractor = timm.layers.create_feature_extractor(model, ["layer1", "layer2.0.bn1"])
    found = extractor(torch.randn(1, 3, 32, 32))
    assert list(found) == ["layer1", "layer2.0.bn1"]


def test_explain():
    module = BatchNormAct2d(4)
    assert explain(module, torch.randn(2, 4, 3, 3)).path == "cpu"
    assert explain(module)[""] == "fused: BatchNormAct2d + relu"
    assert explain(module)["act"] == "fused: with the model"
    dropped = BatchNormAct2d(4, drop_layer=nn.Dropout2d)
    assert explain(dropped)[""] == "BatchNormAct2d alone: its own layers follow it"
