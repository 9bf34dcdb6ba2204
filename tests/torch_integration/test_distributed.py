"""Training as programs do it: two processes of DDP, activation checkpoints, copies on the way.

The processes talk through gloo, which serves CPU tensors, and CUDA tensors by way of the host: one
GPU is enough.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import everywhere, needs_gloo, reports
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d

STEPS = 4


class Model(nn.Module):
    """Both layers, with our modules or torch's, and no kink at which a rounding could grow."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = BatchNorm2d(8) if ours else nn.BatchNorm2d(8)
        if ours:
            self.hidden = LinearBatchNorm1d(8, 16, activation="silu")
        else:
            self.hidden = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.SiLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, checkpointed: bool = False) -> Tensor:
        for part in (self._convolve, self.hidden):
            x = checkpoint(part, x, use_reentrant=False) if checkpointed else part(x)
        return self.head(x)

    def _convolve(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.convolution(x))).mean((2, 3))


def make_model(ours: bool, device: str) -> Model:
    torch.manual_seed(1)
    return Model(ours).to(device)


def make_batch(step: int, rank: int, device: str) -> tuple[Tensor, Tensor]:
    """Of another mean and spread in each process, so that their statistics differ."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(12, 3, 6, 6, generator=generator) * (1.0 + rank) + rank
    return x.to(device), torch.randint(4, (12,), generator=generator).to(device)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int,
    device: str,
    **options,
) -> None:
    for step in steps:
        x, target = make_batch(step, rank, device)
        optimizer.zero_grad()
        F.cross_entropy(model(x, **options), target).backward()
        optimizer.step()


def tensors(model: nn.Module) -> list[Tensor]:
    """In an order that does not depend on the names, which differ."""
    return [*(p.detach() for p in model.parameters()), *model.buffers()]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Some steps of order 1 by different roundings of 2^-24 each; on CUDA in different kernels."""
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-5)


def counters(model: nn.Module) -> list[int]:
    return [int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]


# What runs in each process.


def distribute(ours: bool, device: str, **options) -> DistributedDataParallel:
    return DistributedDataParallel(make_model(ours, device), **options)


def trains_to_torchs_weights(device: str) -> None:
    models, rank = {}, dist.get_rank()
    for ours in (True, False):
        models[ours] = model = distribute(ours, device)
        seen = []
        # Runs behind DDP's broadcast and in front of the batch.
        model.module.norm.register_forward_pre_hook(
            lambda m, _, seen=seen: seen.append(m.running_mean.clone())
        )
        train(model, make_optimizer(model), range(STEPS), rank, device)
        for mean in seen:
            first, second = everywhere(mean)
            assert torch.equal(first, second), "the buffers were not broadcast before the forward"
        assert counters(model) == [STEPS, STEPS]
        for parameter in model.parameters():
            first, second = everywhere(parameter.detach())
            assert torch.equal(first, second), "the processes' weights differ"
        first, second = everywhere(model.module.norm.running_mean)
        assert not torch.allclose(first, second), "the last batches were the same"
    assert_close(tensors(models[True]), tensors(models[False]))
    start = make_model(True, device)
    assert not torch.allclose(start.norm.weight, models[True].module.norm.weight, atol=1e-3), (
        "nothing was learnt"
    )

    x, _ = make_batch(99, 0, device)
    evaluated = [models[ours].eval()(x) for ours in (True, False)]
    assert_close(evaluated[:1], evaluated[1:])


def two_forwards_before_a_backward(device: str) -> None:
    """The second forward's broadcast overwrites buffers between the first and its backward.

    On CUDA torch's BatchNorm keeps the running buffers for its backward, which then refuses: its
    model does without the broadcast, on which gradients don't depend.
    """
    found, rank = [], dist.get_rank()
    for ours in (True, False):
        model = distribute(ours, device, broadcast_buffers=ours)
        first, second = (model(make_batch(step, rank, device)[0]) for step in (0, 1))
        (first.square().mean() + second.square().mean()).backward()
        found.append(gradients(model))
    assert_close(*found)


def accumulates_without_sync(device: str) -> None:
    found, rank = [], dist.get_rank()
    for ours in (True, False):
        model = distribute(ours, device)
        with model.no_sync():
            model(make_batch(0, rank, device)[0]).square().mean().backward()
        model(make_batch(1, rank, device)[0]).square().mean().backward()
        found.append(gradients(model))
        for gradient in found[-1]:
            first, second = everywhere(gradient)
            assert torch.equal(first, second)
    assert_close(*found)


def checkpoints_activations(device: str) -> None:
    found, rank = [], dist.get_rank()
    for ours in (True, False):
        model = distribute(ours, device)
        train(model, make_optimizer(model), range(2), rank, device, checkpointed=True)
        found.append(tensors(model))
        assert counters(model) == [4, 4]
    assert_close(*found)


TASKS = (
    trains_to_torchs_weights,
    two_forwards_before_a_backward,
    accumulates_without_sync,
    checkpoints_activations,
)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("task", [task.__name__ for task in TASKS])
def test_two_processes(task, device):
    report = reports(TASKS, 2, device)[task]
    assert not report, report


# One process.


def through_state_dicts(
    model: Model, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = Model(isinstance(model.norm, BatchNorm2d)).to(model.head.weight.device)
    other.load_state_dict(state["model"])
    optimizer = make_optimizer(other)
    optimizer.load_state_dict(state["optimizer"])
    return other, optimizer


def through_torch_save(pair):
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": through_torch_save,
    "state dicts": lambda pair: through_state_dicts(*pair),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_in_a_copy(way, device):
    """Model, optimiser and gradients together: the copy goes on as the original, bit by bit."""
    model = make_model(True, device)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2), 0, device)
    copied, copied_optimizer = WAYS[way]((model, optimizer))
    before = [t.clone() for t in tensors(model)]
    train(copied, copied_optimizer, range(2, 4), 0, device)
    for now, then in zip(tensors(model), before, strict=True):
        assert torch.equal(now, then), "the copy shares memory with the original"
    train(model, optimizer, range(2, 4), 0, device)
    assert counters(copied) == counters(model) == [4, 4]
    for mine, yours in zip(tensors(copied), tensors(model), strict=True):
        if device == "cpu":
            assert torch.equal(mine, yours)
        else:  # the convolution's backward may add in any order there
            torch.testing.assert_close(mine, yours, rtol=1e-5, atol=1e-6)


def test_activation_checkpointing(device):
    """Gradients as without it. The forward runs twice: counters and statistics move, as torch's."""
    x, target = make_batch(0, 0, device)
    plain, ours, theirs = (make_model(is_ours, device) for is_ours in (True, True, False))
    for model in (plain, ours, theirs):
        F.cross_entropy(model(x, checkpointed=model is not plain), target).backward()
    assert counters(plain) == [1, 1]
    assert counters(ours) == counters(theirs) == [2, 2]
    for mine, yours in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-6, atol=1e-7)
    assert_close(gradients(ours), gradients(theirs))
    assert_close(tensors(ours), tensors(theirs))
