"""SyncBatchNorm in one process: by itself the local layer, its pieces, its state and conversion."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from sync_cases import assert_near
from torch import nn
from torch.nn.utils import parametrize

import cutlass_bn
from cutlass_bn import (
    BatchNorm2d,
    LinearBatchNorm1d,
    SyncBatchNorm,
    convert,
    convert_sync_batchnorm,
    explain,
    revert,
)
from cutlass_bn.functional import _local, _sync_batch_norm
from cutlass_bn.functional._collectives import Group

ALONE = Group("alone", 1)  # with collectives that are replaced


@pytest.fixture
def alone(monkeypatch):
    """A group of one that takes the way of synchronised statistics."""
    monkeypatch.setattr(_sync_batch_norm, "all_gather", lambda vector, _: vector.view(1, -1))
    monkeypatch.setattr(_sync_batch_norm, "all_reduce", lambda tensor, _: tensor.clone())


def test_without_a_process_group_it_is_batch_norm(device):
    local, norm = BatchNorm2d(3, activation="silu"), SyncBatchNorm(3, activation="silu")
    x = torch.randn(4, 3, 5, 5, device=device)
    for layer in (local.to(device), norm.to(device)):
        layer(x, x)
    assert torch.equal(norm(x, x), local(x, x))
    assert list(norm.state_dict()) == list(local.state_dict())
    for ours, theirs in zip(norm.buffers(), local.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert explain(norm, x) == explain(local, x)
    layer = LinearBatchNorm1d(4, 3, process_group="world").to(device)
    separate = LinearBatchNorm1d(4, 3).to(device)
    separate.load_state_dict(layer.state_dict())
    row = torch.randn(5, 4, device=device)
    assert torch.equal(layer(row), separate(row))


def test_signature():
    theirs, ours = (list(inspect.signature(cls).parameters)
                    for cls in (nn.SyncBatchNorm, SyncBatchNorm))  # fmt: skip
    positional = [name for name in theirs if name != "bias"]  # a keyword of later releases
    assert ours[: len(positional)] == positional
    norm = SyncBatchNorm(3, 0.1, None, False, False, None, "meta", torch.float64)
    assert (norm.eps, norm.momentum, norm.affine, norm.track_running_stats) == (
        0.1, None, False, False,
    )  # fmt: skip
    assert not isinstance(norm, nn.SyncBatchNorm)
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)


def test_errors():
    with pytest.raises(TypeError, match="process_group: expected"):
        SyncBatchNorm(3, process_group=1)
    with pytest.raises(TypeError, match="process_group: expected"):
        LinearBatchNorm1d(3, 3, process_group=[0, 1])
    with pytest.raises(TypeError, match="process_group: expected"):
        convert_sync_batchnorm(nn.BatchNorm2d(3), process_group=2)
    with pytest.raises(ValueError, match="activation"):
        SyncBatchNorm(3, activation="tanh")
    with pytest.raises(ValueError, match="at least 2D"):
        SyncBatchNorm(3)(torch.ones(3))
    with pytest.raises(ValueError, match="channels"):
        SyncBatchNorm(0)(torch.ones(3, 0))
    with pytest.raises(ValueError, match="more than 1 value"):
        SyncBatchNorm(3)(torch.ones(1, 3))


def test_pieces_agree(device):
    """Those of graphs and CUDA with those of the CPU in float64."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((64, 5), (8, 5, 6, 7)):
            u = (torch.randn(shape) * 2 + 100).to(device, dtype)
            wide = u.double().cpu()
            for found, expected in zip(
                _local._TORCH.moments(u), _local._CPU.moments(wide), strict=True
            ):
                torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-9)
            mean, var = _local._CPU.moments(wide)
            stats = torch.stack((mean.float(), mean - mean.float(), var.rsqrt()))
            vectors = torch.rand(3, 5).unbind()
            for scale, gamma, beta in (vectors, (None, None, None)):
                given = [None if v is None else v.to(device) for v in (scale, gamma, beta)]
                v = _local._TORCH.before_activation(
                    u, None, stats.float().to(device), *given, None, torch.float32
                )
                expected = _local._CPU.before_activation(
                    wide, None, stats, scale, gamma, beta, None, torch.float64
                )
                assert_near(v, expected)
            dv = torch.randn(shape) + 3.0
            sums = _local._TORCH.sums(dv.to(device), u, stats.float().to(device), None)
            for found, expected in zip(
                sums, _local._CPU.sums(dv.double(), wide, stats, None), strict=True
            ):
                assert_near(found, expected)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_of_one_is_the_local_layer(dtype, device):
    x, residual = torch.randn(2, 6, 3, 5, 5).to(device, dtype)
    results = []
    for group in (None, ALONE):
        norm = BatchNorm2d(3, activation="gelu").to(device)
        input, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
        buffers = norm.running_mean, norm.running_var, norm.num_batches_tracked
        if group is None:
            y = norm(input, other)
        else:
            affine = norm.weight, norm.bias
            y = _sync_batch_norm.batch_norm(
                input, other, buffers, *affine, norm.momentum, norm.eps, "gelu", group
            )
        y.square().sum().backward()
        gradients = (input.grad, other.grad, norm.weight.grad, norm.bias.grad)
        results.append((y, *gradients, *buffers))
    for ours, local in zip(*results, strict=True):
        assert_near(ours.detach(), local.detach().double().cpu(), max(1e-5, torch.finfo(dtype).eps))


@pytest.mark.gpu
@pytest.mark.usefixtures("alone")
def test_nothing_synchronises():
    norm, x = SyncBatchNorm(3, momentum=None).cuda(), torch.randn(6, 3, 5, 5, device="cuda")
    buffers = norm.running_mean, norm.running_var, norm.num_batches_tracked
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = _sync_batch_norm.batch_norm(
            x.requires_grad_(), None, buffers, norm.weight, norm.bias, None, 1e-5, "silu", ALONE
        )
        y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.num_batches_tracked.item() == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients(activation):
    torch.manual_seed(0)
    vectors = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    x = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    residual = torch.randn_like(x, requires_grad=True)
    buffers = (None, None, None)

    def layer(x, residual, scale, gamma, beta):
        return _sync_batch_norm._normalise(
            x, residual, scale, gamma, beta, None, None, buffers, 0.1, 0.1, activation, x.dtype,
            ALONE,
        )  # fmt: skip

    assert torch.autograd.gradcheck(layer, (x, residual, *vectors))
    assert torch.autograd.gradgradcheck(layer, (x, residual, *vectors))


def test_counts_are_exact_beyond_24_bits():
    count = torch.tensor([2.0**33 + 2**9 + 1], dtype=torch.float64)
    mean = torch.tensor([1e4 + 2**-30, 3.0], dtype=torch.float64)
    vector = _sync_batch_norm._packed(count, mean, torch.ones(2).double(), torch.float32)
    assert vector.dtype == torch.float32
    counts, means, m2 = _sync_batch_norm._unpacked(torch.stack((vector, vector)))
    assert torch.equal(counts, count.expand(2, 1))
    torch.testing.assert_close(means, mean.expand(2, 2), rtol=2**-47, atol=0)
    torch.testing.assert_close(m2, count.expand(2, 2), rtol=2**-22, atol=0)


def test_merge_ignores_empty_ranks():
    counts = torch.tensor([[0.0], [3.0], [0.0], [1.0]], dtype=torch.float64)
    means = torch.tensor([[9.0], [1.0], [float("nan")], [5.0]], dtype=torch.float64)
    m2 = torch.tensor([[0.0], [6.0], [0.0], [0.0]], dtype=torch.float64)
    count, mean, var = _sync_batch_norm._merged(counts, means, m2)
    assert (count.item(), mean.item(), var.item()) == (4.0, 2.0, (6.0 + 3.0 + 9.0) / 4.0)


def test_state_dict_and_reset():
    norm = SyncBatchNorm(3)
    norm.load_state_dict(nn.SyncBatchNorm(3).state_dict())
    nn.BatchNorm2d(3).load_state_dict(norm.state_dict())
    with torch.no_grad():
        norm.weight.fill_(3.0)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(3))
    assert torch.fx.symbolic_trace(nn.Sequential(norm)).graph.nodes
    assert "activation='relu'" in repr(SyncBatchNorm(3, activation="relu"))


class Norm(nn.BatchNorm2d):
    pass


def model() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), BatchNorm2d(4, activation="silu"),
        LinearBatchNorm1d(4, 3), block,
    )  # fmt: skip


def test_conversion_keeps_objects_and_flags():
    theirs = model()
    theirs[1].eps, theirs[1].momentum = 0.5, None
    theirs[3].eval()
    for converted in (theirs, convert(copy.deepcopy(theirs))):
        parameters, modules = list(converted.parameters()), list(converted.modules())
        names = list(converted.state_dict())
        assert convert_sync_batchnorm(converted) is converted
        assert convert_sync_batchnorm(converted) is converted  # and once more
        assert all(a is b for a, b in zip(parameters, converted.parameters(), strict=True))
        assert all(a is b for a, b in zip(modules, converted.modules(), strict=True))
        assert list(converted.state_dict()) == names
        norm = converted[1]
        assert type(norm) is type(converted[3]) is type(converted[5][1]) is SyncBatchNorm
        assert (norm.eps, norm.momentum, norm.training) == (0.5, None, True)
        assert not converted[3].training
        assert converted[3].activation == "silu"
        assert type(converted[4].bn) is SyncBatchNorm
        assert converted[4].process_group == "world"
        assert "synchronised over 1 ranks" in explain(converted)["1"]
        assert "synchronised over 1 ranks" in explain(converted)["4"]


def test_conversion_of_fused_neighbours():
    converted = convert_sync_batchnorm(convert(model()))
    assert "Linear + SyncBatchNorm + ReLU" in explain(converted)["5.1"]
    reverted = revert(copy.deepcopy(converted))
    assert type(reverted[1]) is type(reverted[5][1]) is nn.SyncBatchNorm
    assert type(reverted[3]) is SyncBatchNorm  # with an activation
    again = convert(reverted)
    assert type(again[1]) is SyncBatchNorm
    x = torch.randn(5, 4)
    assert torch.equal(again[5](x), converted[5](x))


def test_a_model_that_is_a_norm():
    assert type(convert_sync_batchnorm(nn.BatchNorm3d(3))) is SyncBatchNorm
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))) is SyncBatchNorm
    assert type(revert(convert(nn.SyncBatchNorm(3)))) is nn.SyncBatchNorm


def test_conversion_leaves_alone_and_says_so():
    hooked, parametrised = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    hooked.register_forward_hook(lambda *_: None)
    parametrize.register_parametrization(parametrised, "weight", nn.Tanh())
    others = (hooked, parametrised, nn.InstanceNorm2d(3), Norm(3), nn.LazyBatchNorm2d())
    converted = convert_sync_batchnorm(nn.Sequential(*others))
    assert not any(isinstance(module, SyncBatchNorm) for module in converted)
    assert all("left alone" in text for text in explain(converted).values())
    with pytest.raises(TypeError, match="convert the model first"):
        convert_sync_batchnorm(nn.DataParallel(nn.BatchNorm2d(3)))


def test_a_shared_norm_is_synchronised():
    norm = nn.BatchNorm2d(3)
    assert type(convert_sync_batchnorm(nn.Sequential(norm, nn.ReLU(), norm))[2]) is SyncBatchNorm


def test_timms_norms_are_synchronised():
    from vision import timm

    theirs = nn.Sequential(timm.layers.BatchNormAct2d(3), cutlass_bn.BatchNormAct2d(3))
    for _ in range(2):
        converted = convert_sync_batchnorm(theirs)
        for norm in converted:
            assert type(norm) is cutlass_bn.BatchNormAct2d
            assert norm.process_group == "world"
    assert "synchronised over 1 ranks" in explain(converted)["0"]
    assert copy.deepcopy(converted)[0].process_group == "world"
    assert pickle.loads(pickle.dumps(converted))[0].is_synchronised
    x = torch.randn(2, 3, 4, 4)
    y = copy.deepcopy(converted)(x)
    reverted = revert(converted)
    assert all(type(norm) is timm.layers.SyncBatchNormAct for norm in reverted)
    torch.testing.assert_close(reverted(x), y)
    assert convert(cutlass_bn.BatchNormAct2d(3)).process_group is None


def test_groups_survive():
    norm = nn.SyncBatchNorm(3)
    converted = convert_sync_batchnorm(nn.Sequential(SyncBatchNorm(3, process_group="a"), norm))
    assert [module.process_group for module in converted] == ["a", None]
    convert_sync_batchnorm(converted, "b")
    assert [module.process_group for module in converted] == ["b", "b"]
    for copied in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert copied[0].process_group == "b"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torchs_conversion_takes_ours():
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(SyncBatchNorm(3)))
    assert type(theirs[0]) is nn.SyncBatchNorm


def test_public_names():
    assert cutlass_bn.SyncBatchNorm is SyncBatchNorm
    assert cutlass_bn.convert_sync_batchnorm is convert_sync_batchnorm
