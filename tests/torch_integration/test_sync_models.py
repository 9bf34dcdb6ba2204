"""Synchronised layers as programs use them: DDP, checkpoints, torch.compile, groups, conversion."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from processes import assert_same_bits, needs_gloo, reports
from sync_cases import assert_as_whole, assert_near, counted, part_of, place
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cutlass_bn
from cutlass_bn import LinearBatchNorm1d, SyncBatchNorm

ROWS = {2: (2, 5), 4: (1, 3, 2, 4)}


class Model(nn.Module):
    def __init__(self, process_group="world") -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = SyncBatchNorm(4, process_group=process_group, activation="silu")
        self.hidden = LinearBatchNorm1d(4, 6, activation="silu", process_group=process_group)
        self.head = nn.Linear(6, 2)

    def forward(self, x, checkpointed=False):
        for part in (self._convolve, self.hidden):
            x = checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)
        return self.head(x)

    def _convolve(self, x):
        return self.norm(self.convolution(x)).mean((2, 3))


def make_model(device: str, dtype=torch.float32) -> Model:
    torch.manual_seed(1)
    return Model().to(device=device, dtype=dtype)


def whole_model() -> Model:
    """The same in one process, in float64."""
    model = make_model("cpu", torch.float64)
    model.norm = cutlass_bn.BatchNorm2d(4, activation="silu").double()
    model.hidden.bn = nn.BatchNorm1d(6).double()
    return model


def assert_trains_as_whole(model, device, steps=3, rate=1.0, **options):
    """Losses are sums over the whole batch, times the ranks, of which DDP takes the mean."""
    rank, size = place()
    rows = ROWS[size]
    inner = getattr(model, "module", model)
    whole = whole_model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, whole)]
    for _ in range(steps):
        x, target = torch.randn(sum(rows), 3, 5, 5), torch.randn(sum(rows), 2)
        for m, optimizer in zip((model, whole), optimizers, strict=True):
            optimizer.zero_grad()
            if m is whole:
                (m(x.double()) - target.double()).square().sum().backward()
            else:
                parts = (part_of(t, rows, rank).to(device) for t in (x, target))
                own, its_target = parts
                (m(own, **options) - its_target).square().sum().mul(size).backward()
            optimizer.step()
    for (name, ours), theirs in zip(
        inner.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        if name.endswith("num_batches_tracked"):
            continue
        assert_same_bits(ours)
        if "checkpointed" not in options or "running" not in name:
            assert_near(ours, theirs.double(), 1e-4)
    return inner


def ddp(device):
    assert_trains_as_whole(DistributedDataParallel(make_model(device)), device)


def ddp_and_checkpoints(device):
    """The forward runs twice: the same collectives, and buffers that move twice, as torch's."""
    model = DistributedDataParallel(make_model(device))
    inner = assert_trains_as_whole(model, device, steps=2, checkpointed=True)
    assert inner.norm.num_batches_tracked.item() == 4


def two_forwards_before_a_backward(device):
    model = DistributedDataParallel(make_model(device))
    rank, _ = place()
    outputs = [model(torch.randn(2 + rank, 3, 5, 5, device=device)) for _ in range(2)]
    sum(y.sum() for y in outputs).backward()


def torchs_norm_in_ddp(device):
    """DDP refuses torch.nn.SyncBatchNorm on the CPU; our conversion helps."""
    model = make_model(device)
    model.hidden.bn = nn.SyncBatchNorm.convert_sync_batchnorm(model.hidden.bn)
    if device == "cpu":
        with pytest.raises(ValueError, match="SyncBatchNorm"):
            DistributedDataParallel(model)
    cutlass_bn.convert_sync_batchnorm(model)
    assert type(model.hidden.bn) is SyncBatchNorm
    assert_trains_as_whole(DistributedDataParallel(model), device, steps=1)


def a_model_built_before_its_groups_exist(device):
    assert dist.is_initialized()
    model = Model("later").to(device)
    x = torch.randn(2, 3, 5, 5, device=device)
    with pytest.raises(RuntimeError, match="later"):
        model(x)
    group = dist.new_group()
    model.norm.process_group = model.hidden.bn.process_group = group.group_name
    with counted() as made:
        model(x)
    assert made == ["all_gather"] * 2


def copies_and_pickles(device):
    group = dist.new_group()
    for own in (group, "world", init_device_mesh(device, (place()[1],))):
        layer = LinearBatchNorm1d(4, 3, process_group=own)
        for module, shape in ((SyncBatchNorm(3, process_group=own), (2, 3, 2)), (layer, (2, 4))):
            assert copy.deepcopy(module).process_group is module.process_group is own
            loaded = pickle.loads(pickle.dumps(module)).to(device)
            assert isinstance(loaded.process_group, str)
            assert own is not group or loaded.process_group == group.group_name
            with counted() as made:
                loaded(torch.randn(shape, device=device))
            assert made == ["all_gather"]
    world = SyncBatchNorm(3, process_group=dist.group.WORLD)
    assert pickle.loads(pickle.dumps(world)).process_group == "world"


def conversion(device):
    own = dist.new_group()
    theirs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    theirs.append(nn.SyncBatchNorm(4, process_group=own))
    model = cutlass_bn.convert_sync_batchnorm(theirs).to(device)
    assert model[3].process_group is own
    cutlass_bn.convert(model)
    size = place()[1]
    assert f"synchronised over {size} ranks" in cutlass_bn.explain(model)["1"]
    with counted() as made:
        model(torch.randn(2, 3, 6, 6, device=device))
    assert made == ["all_gather"] * 2
    cutlass_bn.revert(model)
    assert type(model[1]) is type(model[3]) is nn.SyncBatchNorm
    assert model[1].process_group is None
    assert model[3].process_group is own
    named = SyncBatchNorm(4, process_group=own.group_name)
    assert cutlass_bn.revert(named).process_group is own


def tensors_that_stand_for_others(device):
    """Of those torch's own forward would take local statistics."""
    mesh = init_device_mesh(device, (place()[1],))
    x = distribute_tensor(torch.randn(4, 3, 2, device=device), mesh)
    norm = SyncBatchNorm(3, device=device)
    with pytest.raises(NotImplementedError, match="DTensor"):
        norm(x)


def explains(device):
    size = place()[1]
    x = torch.ones(2, 3, 4, 4, device=device)
    for norm in (SyncBatchNorm(3, device=device), nn.SyncBatchNorm(3, device=device)):
        norm = cutlass_bn.convert(norm)
        assert f"synchronised over {size} ranks" in str(cutlass_bn.explain(norm, x))
        assert f"synchronised over {size} ranks" in str(cutlass_bn.explain(norm))
        assert "synchronised" not in str(cutlass_bn.explain(norm.eval(), x))


def assert_compiled_as_eager(eager, traced, call, x):
    """One step of both, the second of which is traced."""
    results = []
    for model, function in ((eager, eager), (traced, call)):
        model.zero_grad()
        input = x.clone().requires_grad_()
        y = function(input)
        y.square().sum().backward()
        gradients = (parameter.grad for parameter in model.parameters())
        results.append((y, input.grad, *gradients, *model.buffers()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def compiled(device):
    """Over each kind of group, and with other numbers of rows, none among them."""
    rank, size = place()
    group = dist.new_group()
    x = torch.randn(3 + rank, 3, 5, 5, device=device)
    groups = (group, group.group_name, init_device_mesh(device, (size,)))
    norms = [SyncBatchNorm(3, process_group=own).to(device) for own in groups]
    for eager in (make_model(device), *norms):
        torch._dynamo.reset()
        traced = copy.deepcopy(eager)
        function = torch.compile(traced, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert_compiled_as_eager(eager, traced, function, x)
    for rows in ((5, 6), (0, 7), (8, 1)):
        x = torch.randn(rows[rank], 3, 5, 5, device=device)
        assert_compiled_as_eager(eager, traced, function, x)
    for buffer in traced.buffers():
        assert_same_bits(buffer)


def compiled_by_inductor(device):
    torch._dynamo.reset()
    rank, _ = place()
    eager = SyncBatchNorm(3, activation="relu", momentum=None).to(device)
    traced = copy.deepcopy(eager)
    function = torch.compile(traced, fullgraph=True)
    x = torch.randn(3 + rank, 3, 5, device=device)
    torch.testing.assert_close(function(x), eager(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(traced.running_var, eager.running_var)


def subgroups(device):
    """Pairs, each with a batch of its own; and pairs and the world in one model."""
    rank, _ = place()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    torch.manual_seed(rank // 2)
    x = torch.randn(7, 3, 4, device=device)
    norm = SyncBatchNorm(3, process_group=mine, device=device)
    assert_as_whole(norm, x, (2, 5), group=mine)
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replicas", "pair"))
    assert_as_whole(
        SyncBatchNorm(3, process_group=mesh["pair"], device=device), x, (2, 5), group=mine
    )
    with pytest.raises(TypeError, match="process_group"):
        SyncBatchNorm(3, process_group=3)

    norm.process_group = pairs[0]  # others are not in it, and run locally
    with counted() as made:
        norm(x)
    assert made == (["all_gather"] if rank < 2 else [])

    nested = nn.Sequential(SyncBatchNorm(3, process_group=mine), SyncBatchNorm(3)).to(device)
    y = nested(torch.randn(2 + rank, 3, 4, device=device, requires_grad=True))
    y.square().sum().backward()
    assert_same_bits(nested[1].running_var)
    with pytest.raises(AssertionError):
        assert_same_bits(nested[0].running_var)


EVERYWHERE = (
    ddp,
    ddp_and_checkpoints,
    two_forwards_before_a_backward,
    torchs_norm_in_ddp,
    a_model_built_before_its_groups_exist,
    copies_and_pickles,
    conversion,
    tensors_that_stand_for_others,
    explains,
)
TASKS = {2: (*EVERYWHERE, compiled, compiled_by_inductor), 4: (subgroups, ddp)}
CASES = [(task.__name__, size) for size, tasks in TASKS.items() for task in tasks]


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize(("task", "size"), CASES)
def test_processes(task, size, device):
    report = reports(TASKS[size], size, device)[task]
    assert not report, report
