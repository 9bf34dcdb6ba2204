"""Whole training steps of a model with both modules: compiled, and captured in a CUDA graph."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from linear_cases import max_error
from torch import Tensor, nn

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d

SMALL = (48, 4)  # images, and their height and width
# Large enough for split products in float32, forward and backward, on a Hopper GPU.
LARGE = (1100, 8)
CLASSES = 10


class Both(nn.Module):
    def __init__(self, size: int, momentum: float | None) -> None:
        super().__init__()
        features = 16 * size * size
        self.norm = BatchNorm2d(16, momentum=momentum)
        self.hidden = LinearBatchNorm1d(
            features, features + 16, activation="silu", momentum=momentum
        )
        self.head = nn.Linear(features + 16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.hidden(F.silu(self.norm(images)).flatten(1)))


def batch(sizes: tuple[int, int], device: str) -> tuple[Tensor, Tensor]:
    count, size = sizes
    images = torch.randn(count, 16, size, size, device=device) + 0.5
    return images, torch.randint(CLASSES, (count,), device=device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    amp: bool = False,
) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    # Without autocast's cache, which would hold casts of another step's weights in a graph.
    with torch.autocast(images.device.type, torch.bfloat16, enabled=amp, cache_enabled=False):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_same_state(model: nn.Module, other: nn.Module, tolerance: float) -> None:
    for (name, ours), theirs in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert max_error(ours, theirs) < tolerance, name


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("device", "sizes", "backend"),
    [
        ("cpu", SMALL, "aot_eager"),
        pytest.param("cuda", SMALL, "inductor", marks=[pytest.mark.gpu, pytest.mark.slow]),
        pytest.param("cuda", LARGE, "inductor", marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
)
def test_compiled_steps(device, sizes, backend, momentum):
    """One graph forward and one backward, compiled in the first step alone."""
    torch.compiler.reset()
    model = Both(sizes[1], momentum).to(device)
    other = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    optimizers = sgd(model), sgd(other)
    for index in range(4):
        data = batch(sizes, device)
        with torch.compiler.set_stance("default" if index == 0 else "fail_on_recompile"):
            loss = step(compiled, optimizers[0], *data)
        assert max_error(loss, step(other, optimizers[1], *data)) < 1e-5
    assert_same_state(model, other, 1e-4)
    assert model.norm.num_batches_tracked == model.hidden.bn.num_batches_tracked == 4


@pytest.mark.gpu
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_captured_steps(sizes, amp, momentum):
    """A replay is a step: of parameters, optimizer, running statistics and counters."""
    model = Both(sizes[1], momentum).cuda()
    optimizer = sgd(model)
    images, labels = batch(sizes, "cuda")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(model, optimizer, images, labels, amp)
    torch.cuda.current_stream().wait_stream(side)
    other = copy.deepcopy(model)
    other_optimizer = sgd(other)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimizer, images, labels, amp)
    assert_same_state(model, other, 1e-12)  # captured, not run
    for _ in range(3):
        for tensor, fresh in zip((images, labels), batch(sizes, "cuda"), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        assert max_error(loss, step(other, other_optimizer, images, labels, amp)) < (
            1e-2 if amp else 1e-5
        )
    assert_same_state(model, other, 1e-2 if amp else 1e-4)
    assert model.norm.num_batches_tracked == model.hidden.bn.num_batches_tracked == 5
