"""cutlass_bn.convert and revert: swapped modules, fused neighbours, and what is left alone."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from convert_cases import (
    IMAGE,
    Doubling,
    Named,
    assert_same,
    features,
    hook,
    images,
    note_calls,
    twins,
)
from torch import nn

from cutlass_bn import convert, explain, revert


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_calls(monkeypatch)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.GELU()), (5, 3)),
    "1d, three dimensions": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.GELU()), (5, 3, 4)),
    "2d": (images, IMAGE),
    "3d": (lambda: nn.Sequential(nn.BatchNorm3d(3), nn.LeakyReLU()), (2, 3, 4, 4, 4)),
    "Linear": (features, (5, 3)),
    "Linear without activation": (lambda: features()[:2], (5, 3)),
    "Linear, three dimensions": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(5), nn.ReLU()),
        (2, 5, 3),
    ),
    "subclass": (Named, IMAGE),
    "other forward": (Doubling, IMAGE),
    "nested": (
        lambda: nn.Sequential(images(), nn.Flatten(), nn.Sequential(nn.Linear(64, 2))),
        IMAGE,
    ),
    "root": (lambda: nn.BatchNorm2d(3), IMAGE),
    "no affine": (lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.ReLU()), IMAGE),
    "no statistics": (
        lambda: nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.ReLU()),
        IMAGE,
    ),
    "cumulative": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU()),
        (5, 3),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_computes_what_torch_does(name):
    make, shape = MODELS[name]
    ours, theirs = twins(make)
    assert convert(ours) is ours
    assert_same(ours, theirs, *shape)
    assert repr(ours) == repr(theirs)
    revert(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    assert [vars(m).keys() for m in ours.modules()] == [vars(m).keys() for m in theirs.modules()]
    assert_same(ours, theirs, *shape)


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (images(), IMAGE, ["BatchNorm + relu"]),
        (Named(), IMAGE, ["BatchNorm + relu"]),
        (features(), (5, 3), ["Linear + BatchNorm + silu"]),
        (features(nn.LeakyReLU()), (5, 3), ["Linear + BatchNorm + leaky_relu"]),
        (features(nn.GELU()), (5, 3), ["Linear + BatchNorm + gelu"]),
        (features(nn.LeakyReLU(0.3)), (5, 3), ["Linear + BatchNorm + None"]),
        (features(nn.GELU("tanh")), (5, 3), ["Linear + BatchNorm + None"]),
        (features(nn.PReLU()), (5, 3), ["Linear + BatchNorm + None"]),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(), nn.ReLU()), IMAGE, []),
        (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU6()), IMAGE, []),
    ],
)
def test_fuses(model, shape, expected, calls):
    convert(model)(torch.randn(shape))
    assert calls == expected


def test_keeps_the_objects():
    model = images().double()
    objects = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = list(model.modules())
    model[1].train(False).momentum = 0.3
    model[1].weight.requires_grad_(False)
    convert(model)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is objects[name]
    assert not model[1].training
    assert model[1].momentum == 0.3
    assert not model[1].weight.requires_grad
    assert model[1].weight.dtype == torch.float64


def test_is_idempotent(calls):
    model = convert(convert(features()))
    before = [type(m) for m in model.modules()]
    assert before == [type(m) for m in convert(model).modules()]
    model(torch.randn(5, 3))
    assert calls == ["Linear + BatchNorm + silu"]


def ways() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def saved(model: nn.Module) -> nn.Module:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    return {"pickle": lambda m: pickle.loads(pickle.dumps(m)), "copy": copy.deepcopy, "save": saved}


@pytest.mark.parametrize("way", ways())
@pytest.mark.parametrize("make", [images, Named], ids=["Sequential", "subclass"])
def test_copies_and_pickles(make, way, calls):
    model = convert(make())
    other = ways()[way](model)
    assert type(other) is type(model)
    other(torch.randn(IMAGE))
    assert calls == ["BatchNorm + relu"]
    assert type(revert(other)) is make().__class__


def test_children_are_torchs_by_themselves(calls):
    model, theirs = twins(images)
    convert(model)
    x = torch.randn(IMAGE)
    tapped = model[1](model[0](x))
    assert (tapped < 0).any()
    torch.testing.assert_close(tapped, theirs[1](theirs[0](x)))
    torch.testing.assert_close(model[:2](x), theirs[:2](x))
    assert torch.equal(model[2](-x.abs()), torch.zeros_like(x))
    for child in model:
        x = child(x)
    assert calls == []


LATER: dict[str, Callable[[nn.Module], object]] = {
    "hook on the norm": lambda m: m[1].register_forward_hook(hook),
    "hook on the activation": lambda m: m[2].register_forward_pre_hook(hook),
    "backward hook": lambda m: (
        setattr(m[2], "inplace", False),
        m[2].register_full_backward_hook(hook),
    ),
    "norm replaced": lambda m: m.__setitem__(1, nn.BatchNorm2d(4)),
    "activation replaced": lambda m: m.__setitem__(2, nn.Tanh()),
    "activation patched": lambda m: setattr(m[2], "forward", torch.tanh),
    "inserted": lambda m: m.insert(2, nn.Dropout(0.0)),
    "removed": lambda m: m.__delitem__(2),
    "an activation of the norm": lambda m: setattr(m[1], "activation", "silu"),
    "synchronised": nn.SyncBatchNorm.convert_sync_batchnorm,
}


@pytest.mark.parametrize("change", LATER)
def test_changes_made_later_hold(change, calls):
    model, theirs = twins(images)
    convert(model)
    for m in (model.eval(), theirs.eval()):
        if change == "an activation of the norm" and m is theirs:
            m[1] = nn.Sequential(m[1], nn.SiLU())
        else:
            LATER[change](m)
    x = torch.randn(IMAGE)
    torch.testing.assert_close(model(x), theirs(x))
    assert calls == []
    if "replaced" in change:
        assert "left alone" in str(explain(model)) or "alone" in str(explain(model))


def test_global_hooks_see_each_module(calls):
    model, seen = convert(images()), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        model(torch.randn(IMAGE))
    finally:
        handle.remove()
    assert seen == [*model, model]
    assert calls == []


def test_shared_activation():
    relu = nn.ReLU()
    model = nn.Sequential(nn.BatchNorm2d(3), relu, nn.BatchNorm2d(3), relu)
    report = explain(convert(model))
    assert all(report[name].startswith("fused") for name in "0123")


def test_optimizer_and_averages_stay_valid():
    model, theirs = twins(features)
    models = (model, theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in models]
    convert(model)
    x = torch.randn(5, 3)
    for m, optimizer, average in zip(models, optimizers, averages, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
            average.update_parameters(m)
    for pair in (models, averages):
        for a, b in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_explain_lists_every_module():
    model = nn.ModuleDict({"a": images(), "b": nn.ModuleList([features(), nn.BatchNorm1d(3)])})
    before = explain(model)
    assert before["a.1"] == "left alone: not converted"
    report = explain(convert(model))
    assert list(report) == ["a.1", "a.2", "b.0.0", "b.0.1", "b.0.2", "b.0.3", "b.1"]
    assert report["a.1"] == "fused: BatchNorm2d + ReLU, with a.2"
    assert report["b.0.0"] == "fused: Linear + BatchNorm1d + SiLU, with b.0.1, b.0.2"
    assert report["b.0.3"].startswith("left alone: no BatchNorm1d")
    assert report["b.1"].startswith("BatchNorm1d alone")
    assert str(report).splitlines()[0] == "a.1: fused: BatchNorm2d + ReLU, with a.2"


def test_autocast():
    ours, theirs = twins(features)
    convert(ours)
    x = torch.randn(16, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("make", [images, features])
def test_fx_and_compile(make):
    model = convert(make())
    x = torch.randn(IMAGE if make is images else (5, 3))
    plain = copy.deepcopy(model)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == [
        name for name, _ in model.named_children()
    ]
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(x), plain(x))
    torch.testing.assert_close(compiled(x), copy.deepcopy(model)(x))
