"""Training steps in mixed precision: autocast, GradScaler, modules cast as a whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from linear_cases import BF16, FP16, TRAINING, max_error
from torch import Tensor, nn

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d

F32 = torch.float32
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


class Model(nn.Module):
    """Both layers, ours or torch's; without the biases that have no gradient in training."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, bias=False)
        self.norm = BatchNorm2d(16) if ours else nn.BatchNorm2d(16)
        if ours:
            self.hidden = LinearBatchNorm1d(16, 24, bias=False, activation="silu")
        else:
            self.hidden = nn.Sequential(
                nn.Linear(16, 24, bias=False), nn.BatchNorm1d(24), nn.SiLU()
            )
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(F.silu(self.norm(self.convolution(x))).mean((2, 3))))


def make_model(ours: bool, device: str, training: bool = True) -> Model:
    torch.manual_seed(1)
    return Model(ours).to(device).train(training)


def make_batch(device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(32, 3, 7, 7, device=device), torch.randint(4, (32,), device=device)


def loss_of(model: nn.Module, x: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(x.device.type, dtype=dtype):
        logits = model(x)
        assert logits.dtype == dtype
    return F.cross_entropy(logits.float(), target)


def assert_no_worse_than_torch(
    ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], eps: float
) -> None:
    """Error against float32 at most twice torch's in that mode, but for a few roundings."""
    for mine, yours, truth in zip(ours, theirs, exact, strict=True):
        assert mine.isfinite().all()
        assert mine.dtype == yours.dtype
        assert max_error(mine, truth) <= 2 * max_error(yours, truth) + 4 * eps


@TRAINING
@HALVES
def test_autocast_step(dtype, training, device):
    """The backward is outside autocast. Gradients, statistics: float32, no worse than torch's."""
    x, target = make_batch(device)
    found = {}
    for name, ours in (("ours", True), ("theirs", False), ("exact", False)):
        model = make_model(ours, device, training)
        if name == "exact":
            F.cross_entropy(model(x), target).backward()
        else:
            loss_of(model, x, target, dtype).backward()
        statistics = [b for b in model.buffers() if b.is_floating_point()]
        assert all(t.dtype == F32 for t in [*statistics, *(p.grad for p in model.parameters())])
        found[name] = [*(p.grad for p in model.parameters()), *statistics]
    assert_no_worse_than_torch(
        found["ours"], found["theirs"], found["exact"], torch.finfo(dtype).eps
    )


def test_grad_scaler_steps(device):
    """From a scale at which fp16 overflows: steps are skipped as torch's; then the loss falls."""
    x, target = make_batch(device)
    scales = []
    for ours in (True, False):
        model = make_model(ours, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**30, growth_interval=8)
        start = [p.detach().clone() for p in model.parameters()]
        scales.append([])
        for step in range(60):
            loss = loss_of(model, x, target, FP16)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales[-1].append(scaler.get_scale())
            if step == 0:
                assert scales[-1] == [2.0**29], "the overflow was not found"
                assert all(
                    torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True)
                )
        assert all(p.isfinite().all() for p in model.parameters())
        assert loss < 0.6 * F.cross_entropy(make_model(False, device)(x), target), (
            "nothing was learnt"
        )
    # A gradient at the very edge may overflow in one of the two.
    ours, theirs = (torch.tensor(s).log2() for s in scales)
    assert (ours - theirs).abs().max() <= 1


@TRAINING
@HALVES
def test_modules_cast_as_a_whole(dtype, training, device):
    """.half(), .bfloat16(): all but the counters is cast, gradients too; no worse than torch's."""
    x, target = make_batch(device)
    x = x.to(dtype)
    found = {}
    for name, ours in (("ours", True), ("theirs", False), ("exact", False)):
        model = make_model(ours, device, training).to(dtype)
        if name == "exact":
            model = model.float()
        for _ in range(2):
            loss = F.cross_entropy(model(x.float() if name == "exact" else x).float(), target)
        loss.backward()
        buffers = list(model.buffers())
        counters = [b for b in buffers if not b.is_floating_point()]
        assert all(c.dtype == torch.int64 for c in counters)
        assert [int(c) for c in counters] == [2 * training] * 2
        statistics = [b for b in buffers if b.is_floating_point()]
        gradients = [p.grad for p in model.parameters()]
        assert name == "exact" or all(t.dtype == dtype for t in [*statistics, *gradients])
        found[name] = [*gradients, *statistics]
    assert_no_worse_than_torch(
        found["ours"], found["theirs"], found["exact"], torch.finfo(dtype).eps
    )


@HALVES
def test_halves_with_float32_parameters(dtype, device):
    """As autocast amounts to for a norm: float32 gradients, of more digits than the input has."""
    module, theirs = BatchNorm2d(8).to(device), nn.BatchNorm2d(8).to(device)
    x = torch.randn(16, 8, 9, 9, device=device).to(dtype)
    dy = torch.randn_like(x)
    y = module(x)
    y.backward(dy)
    theirs(x.float()).backward(dy.float())
    assert y.dtype == dtype
    for mine, yours in zip(module.parameters(), theirs.parameters(), strict=True):
        assert mine.grad.dtype == F32
        assert max_error(mine.grad, yours.grad) < 1e-5
    for name in ("running_mean", "running_var"):
        assert getattr(module, name).dtype == F32
        assert max_error(getattr(module, name), getattr(theirs, name)) < 1e-6


@HALVES
def test_autocast_leaves_float32_input_of_the_norm_alone(dtype, device):
    """batch_norm is on neither of autocast's lists: it keeps its input's dtype, as torch's does."""
    x = torch.randn(4, 3, 5, 5, device=device)
    with torch.autocast(device, dtype=dtype):
        ours, theirs = BatchNorm2d(3).to(device)(x), nn.BatchNorm2d(3).to(device)(x)
    assert ours.dtype == theirs.dtype == F32
    torch.testing.assert_close(ours, theirs)
