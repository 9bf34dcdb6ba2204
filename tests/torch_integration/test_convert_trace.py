"""convert(trace=True): blocks with a forward of their own, and where fusing them would be wrong."""

from __future__ import annotations

import abc
import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traced_blocks import (
    FUSED,
    NOT_FUSED,
    SHAPE,
    Block,
    block,
    by_mode,
    math_and_attributes,
    out_of_place,
    residual_first,
    through_a_method,
)

from cutlass_bn import convert, explain, revert
from cutlass_bn.modules import batch_norm


def twins(make: Callable[[], nn.Module] = Block) -> tuple[nn.Module, nn.Module]:
    theirs = make()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(-0.5, 1.0)
    return copy.deepcopy(theirs), theirs


def assert_same(ours: nn.Module, theirs: nn.Module, x: Tensor | None = None) -> None:
    """Output, its dtype, gradients and state, in both modes."""
    x = torch.randn(SHAPE) if x is None else x
    for training in (True, False):
        results = []
        for model in (ours.train(training), theirs.train(training)):
            input = x.clone().requires_grad_()
            y = model(input)
            parameters = [input, *model.parameters()]
            weights = torch.linspace(-1, 1, y.numel()).view_as(y)
            gradients = torch.autograd.grad((y * weights).sum(), parameters, allow_unused=True)
            results.append((y, *gradients, *model.state_dict().values()))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, bool]]:
    """Activations and whether there was a residual, of the calls that were fused."""
    made: list[tuple[str | None, bool]] = []
    real = batch_norm.batch_norm_with_counter

    def noting(*args):
        *_, activation, residual = args
        if residual is not None or activation is not None:
            made.append((activation, residual is not None))
        return real(*args)

    monkeypatch.setattr(batch_norm, "batch_norm_with_counter", noting)
    return made


def test_block(calls):
    ours, theirs = twins()
    convert(ours, trace=True)
    ours(torch.randn(SHAPE))
    theirs(torch.randn(SHAPE))
    theirs.load_state_dict(ours.state_dict())
    assert calls == [("relu", False), ("relu", True)]
    assert_same(ours, theirs)
    assert repr(ours) == repr(theirs)
    report = explain(ours)
    assert report["bn1"] == "fused: BatchNorm2d + relu, with relu"
    assert report["bn2"] == "fused: BatchNorm2d + residual + relu, with relu"
    assert report["relu"] == "fused: with bn1, bn2"
    assert isinstance(ours, Block)
    assert type(revert(ours)) is Block
    assert_same(ours, theirs)


def test_not_without_being_asked(calls):
    ours = convert(Block())
    assert type(ours) is Block
    ours(torch.randn(SHAPE))
    assert calls == []
    assert "trace=True" in explain(ours)["bn1"]
    convert(ours, trace=True)(torch.randn(SHAPE))
    assert len(calls) == 2


@pytest.mark.parametrize("forward", FUSED, ids=lambda f: f.__name__)
def test_fuses(forward, calls):
    ours, theirs = twins(block(forward))
    convert(ours, trace=True)
    assert_same(ours, theirs)
    fused = len(calls)
    assert fused in (FUSED[forward], 2 * FUSED[forward])
    if forward is by_mode:
        assert fused == 1


@pytest.mark.parametrize("forward", NOT_FUSED, ids=lambda f: f.__name__)
def test_does_not_fuse(forward, calls):
    ours, theirs = twins(block(forward))
    mode = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    before = {**vars(ours), "cache": []}
    convert(ours, trace=True)
    assert vars(ours) == before
    assert_same(ours, theirs)
    assert calls == []
    assert type(ours) is type(theirs)
    assert "alone" in explain(ours)["bn1"]
    assert mode == (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))


def hook(*args: object) -> None:
    return None


CHANGES: dict[str, tuple[Callable[[nn.Module], object], int]] = {
    "no downsample": (lambda m: setattr(m, "downsample", None), 0),
    "norm replaced": (lambda m: setattr(m, "bn1", nn.BatchNorm2d(3)), 0),
    "activation replaced": (lambda m: setattr(m, "relu", nn.Tanh()), 0),
    "activation hooked": (lambda m: m.relu.register_forward_hook(hook), 0),
    "activation patched": (lambda m: setattr(m.relu, "forward", torch.tanh), 0),
    "norm hooked": (lambda m: m.bn2.register_forward_pre_hook(hook), 0),
    "norm patched": (lambda m: setattr(m.bn2, "forward", torch.tanh), 0),
    "synchronised": (nn.SyncBatchNorm.convert_sync_batchnorm, 0),
    "residual's source replaced": (lambda m: setattr(m, "conv2", nn.Identity()), 0),
    "hook on another child": (lambda m: m.downsample[0].register_forward_hook(hook), 2),
    "hook on the block": (lambda m: m.register_forward_hook(hook), 2),
    "eps": (lambda m: setattr(m.bn1, "eps", 0.1), 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_made_later_hold(change, calls):
    ours, theirs = twins()
    convert(ours, trace=True)
    make, fused = CHANGES[change]
    for model in (ours.eval(), theirs.eval()):
        make(model)
    x = torch.randn(SHAPE)
    if change == "synchronised":
        x = x * 1
    torch.testing.assert_close(ours(x), theirs(x))
    assert len(calls) == fused
    if fused == 0:
        assert "fused: B" not in explain(ours).get("bn2", "")


def test_flag_that_was_read(calls):
    ours, theirs = twins(block(math_and_attributes))
    convert(ours, trace=True)
    x = torch.randn(SHAPE)
    for flag, factor in ((True, 3.0), (False, 2.0), (True, 2.0)):
        for model in (ours, theirs):
            model.flag, model.factor = flag, factor
        torch.testing.assert_close(ours(x), theirs(x))
    assert len(calls) == 1


def test_what_a_method_reads(calls):
    ours, theirs = twins(block(through_a_method))
    convert(ours, trace=True)
    x = torch.randn(SHAPE)
    for factor in (2.0, 3.0):
        ours.factor = theirs.factor = factor
        torch.testing.assert_close(ours(x), theirs(x))
    assert len(calls) == 1
    ours.factor, ours.method = 2.0, torch.neg
    torch.testing.assert_close(ours(x), -ours.conv1(x))


def test_forward_patched_later(calls, monkeypatch):
    ours = convert(Block(), trace=True)
    monkeypatch.setattr(Block, "forward", lambda self, x: x)
    x = torch.randn(SHAPE)
    assert ours(x) is x


def test_arguments_by_name_and_mistakes():
    ours, theirs = twins()
    convert(ours, trace=True)
    x = torch.randn(SHAPE)
    torch.testing.assert_close(ours(x=x), theirs(x=x))
    with pytest.raises(TypeError):
        ours()


@pytest.mark.parametrize("forward", [Block.forward, out_of_place, residual_first])
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16], ids=str)
def test_dtype_under_autocast(forward, residual, calls):
    """`out + x` of bfloat16 and float32 is float32, `out += x` bfloat16."""
    ours, theirs = twins(block(forward))
    for model in (ours, theirs):
        model.downsample = None
    convert(ours, trace=True)
    x = torch.randn(SHAPE, dtype=residual)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = ours(x), theirs(x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)
    assert any(residual for _, residual in calls) == (residual is torch.bfloat16)


def test_residual_that_broadcasts(calls):
    def pooled(self, x):
        return self.relu(self.bn1(x) + F.adaptive_avg_pool2d(x, 1))

    ours, theirs = twins(block(pooled))
    convert(ours, trace=True)
    assert_same(ours, theirs)
    assert calls == []


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(way, calls):
    ours = convert(Block(), trace=True)
    other = way(ours.eval())
    x = torch.randn(SHAPE)
    torch.testing.assert_close(other(x), ours(x))
    assert len(calls) == 4
    other.relu = nn.Tanh()
    ours(x)
    assert len(calls) == 6


def test_filter(calls):
    ours = convert(Block(), filter_fn=lambda module, name: name != "relu", trace=True)
    ours(torch.randn(SHAPE))
    assert calls == [(None, True)]
    calls.clear()
    ours = convert(Block(), filter_fn=lambda module, name: name != "bn2", trace=True)
    pickle.loads(pickle.dumps(ours))(torch.randn(SHAPE))
    assert calls == [("relu", False)]


def test_names_of_children_are_the_users(calls):
    def forward(self, x):
        return self.kind(self.base(x))

    class Names(Block):
        def __init__(self):
            super().__init__()
            self.base, self.kind = self.bn1, self.relu
            self.plan, self.fits, self.fusions = nn.Identity(), 1, 2

    Names.forward = forward
    ours, theirs = twins(Names)
    del ours.bn1, theirs.bn1, ours.relu, theirs.relu
    convert(ours, trace=True)
    assert_same(ours, theirs)
    assert len(calls) == 2
    children = dict(
        convert(nn.Sequential(OrderedDict(base=nn.BatchNorm2d(3), kind=nn.ReLU()))).named_children()
    )
    assert list(children) == ["base", "kind"]


class PicklesItself(Block):
    def __reduce__(self):
        return PicklesItself, ()


class CopiesItself(Block):
    def __deepcopy__(self, memo):
        return CopiesItself()


class Registers(Block):
    known: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Registers.known.append(cls)


class Abstract(Block, abc.ABC):
    pass


@pytest.mark.parametrize("cls", [PicklesItself, CopiesItself, Registers, Abstract])
def test_classes_that_must_stay(cls):
    assert type(convert(cls(), trace=True)) is cls
    assert not Registers.known
    parent = Block().eval()
    parent.downsample = cls().eval()
    x = torch.randn(SHAPE)
    expected = parent(x)
    torch.testing.assert_close(convert(parent, trace=True)(x), expected)


class Odd(Block):
    def forward(this, self: torch.Tensor) -> torch.Tensor:
        return Block.forward(this, self)


def test_argument_called_self_stays():
    """torch.fx leaves it out of the graph."""
    model, x = Odd().eval(), torch.randn(SHAPE)
    expected = model(x)
    assert type(convert(model, trace=True)) is Odd
    torch.testing.assert_close(model(x), expected)


def test_class_changed_later_is_not_reverted():
    ours = convert(Block(), trace=True)
    ours.scale = nn.Parameter(torch.ones(1))
    nn.utils.parametrize.register_parametrization(ours, "scale", nn.Tanh())
    x = torch.randn(SHAPE)
    ours(x)
    assert nn.utils.parametrize.is_parametrized(revert(ours))
    ours(x)


def test_fx_and_compile():
    model = convert(Block(), trace=True).eval()
    traced = torch.fx.symbolic_trace(model)
    names = [str(n.target) for n in traced.graph.nodes if n.op == "call_module"]
    assert names[:3] == ["conv1", "bn1", "relu"]
    x = torch.randn(SHAPE)
    torch.testing.assert_close(traced(x), model(x))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
