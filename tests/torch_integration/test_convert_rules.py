"""What convert leaves alone, filters, refuses and says of it; revert."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from convert_cases import IMAGE, features, hook, images, note_calls
from torch import nn
from torch.nn.utils import parametrize, prune

import cutlass_bn
from cutlass_bn import convert, explain, revert


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_calls(monkeypatch)


class Norm(nn.BatchNorm2d):
    """Of a user."""


def shared() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    return nn.Sequential(norm, nn.ReLU(), norm)


def changed(change: Callable[[nn.Module], object], norm: nn.Module | None = None) -> nn.Module:
    model = nn.Sequential(norm or nn.BatchNorm2d(3), nn.ReLU())
    change(model[0])
    return model


LEFT_ALONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooked": (lambda: changed(lambda m: m.register_forward_hook(hook)), "hooks"),
    "shared": (shared, "shared: it is 0 and 2"),
    "parametrised": (
        lambda: changed(lambda m: parametrize.register_parametrization(m, "weight", nn.Tanh())),
        "parametrised",
    ),
    "pruned": (lambda: changed(lambda m: prune.l1_unstructured(m, "weight", 0.5)), "pruned"),
    "patched": (lambda: changed(lambda m: setattr(m, "forward", torch.relu)), "patched"),
    "lazy": (lambda: nn.Sequential(nn.LazyBatchNorm2d(), nn.ReLU()), "lazy"),
    "instance": (lambda: nn.Sequential(nn.InstanceNorm2d(3), nn.ReLU()), "InstanceNorm2d"),
    "subclass": (lambda: nn.Sequential(Norm(3), nn.ReLU()), "Norm"),
    "attribute": (
        lambda: changed(lambda m: (delattr(m, "weight"), setattr(m, "weight", torch.ones(3)))),
        "not a parameter",
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", LEFT_ALONE)
def test_leaves_alone_and_says_why(case):
    make, reason = LEFT_ALONE[case]
    model = make()
    before = [type(m) for m in model.modules()]
    text = explain(convert(model))["0"]
    assert text.startswith("left alone")
    assert reason in text
    assert [type(m) for m in model.modules()] == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_leaves_torchscript_alone():
    model = nn.Sequential(torch.jit.script(images()), images())
    convert(model)
    assert explain(model)["0"] == "left alone: TorchScript"
    assert explain(model)["1.1"].startswith("fused")
    assert isinstance(model[0], torch.jit.ScriptModule)
    model[0](torch.randn(IMAGE))


def test_leaves_our_own_fused_module_alone():
    model = nn.Sequential(cutlass_bn.LinearBatchNorm1d(3, 4), nn.BatchNorm1d(4))
    convert(model)
    assert type(model[0].bn) is nn.BatchNorm1d
    assert explain(model[0], torch.randn(5, 3)).path == "cpu"
    assert set(explain(model)) == {"0", "1"}


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("function", [convert, revert])
def test_refuses_wrapped_models(function, process_group):
    wrapped = [
        nn.DataParallel(images()),
        nn.Sequential(nn.DataParallel(images())),
        nn.parallel.DistributedDataParallel(images()),
        torch.compile(images()),
    ]
    in_place = images()
    in_place.compile()
    for model in (*wrapped, in_place):
        with pytest.raises(TypeError, match=f"{function.__name__} the model first, then wrap it"):
            function(model)


def test_filter_is_asked_and_obeyed(calls):
    model, asked = nn.Sequential(features(), features()), []

    def keep(module: nn.Module, name: str) -> bool:
        asked.append((name, module))
        return name not in ("0.0", "1.2")

    convert(model, filter_fn=keep)
    names = [f"{i}.{j}" for i in range(2) for j in range(4)]
    assert asked == [(name, model.get_submodule(name)) for name in names]
    model[0](torch.randn(5, 3))
    model[1](torch.randn(5, 3))
    assert calls == ["BatchNorm + silu", "Linear + BatchNorm + None"]
    report = explain(model)
    assert report["0.0"] == report["1.2"] == "left alone: filter_fn"
    assert report["0.1"].startswith("fused: BatchNorm1d + SiLU")
    calls.clear()
    pickle.loads(pickle.dumps(model))[1](torch.randn(5, 3))
    assert calls == ["Linear + BatchNorm + None"]
    revert(model)
    assert all("_left_alone_by_convert" not in vars(m) for m in model.modules())


def test_filter_of_a_norm():
    model = convert(images(), filter_fn=lambda module, name: not isinstance(module, nn.BatchNorm2d))
    assert type(model[1]) is nn.BatchNorm2d
    assert type(model) is nn.Sequential
    assert explain(model)["1"] == "left alone: filter_fn"


def test_revert_carries_back_what_has_changed():
    model = convert(images())
    norm = model[1]
    norm.momentum, norm.eps, norm.track_running_stats, norm.note = None, 1e-3, False, "mine"
    model(torch.randn(IMAGE))
    revert(model)
    assert model[1] is norm
    assert type(norm) is nn.BatchNorm2d
    assert (norm.momentum, norm.eps, norm.track_running_stats) == (None, 1e-3, False)
    assert norm.note == "mine"


def test_revert_of_modules_that_were_ours():
    model = nn.Sequential(cutlass_bn.BatchNorm2d(3), cutlass_bn.BatchNorm2d(3, activation="relu"))
    revert(model)
    assert type(model[0]) is nn.BatchNorm2d
    assert type(model[1]) is cutlass_bn.BatchNorm2d
