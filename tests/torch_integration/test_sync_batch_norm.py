"""SyncBatchNorm in two and in four processes, against one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
from processes import needs_gloo, reports
from sync_cases import assert_as_whole, assert_near, counted, part_of, place, summed, whole_norm
from torch import nn

from cutlass_bn import SyncBatchNorm

# Rows by rank: even, uneven, one row, none; the first and the last rank among them.
SPLITS = {2: ((4, 4), (1, 6), (0, 5), (5, 0)), 4: ((3, 3, 3, 3), (1, 5, 2, 0), (0, 0, 7, 1))}
SHAPES = ((5,), (3, 6), (3, 4, 5), (2, 2, 3, 4))  # without the rows
HALVES = (torch.float16, torch.bfloat16)


def splits():
    return SPLITS[place()[1]]


def make_norm(channels: int, device: str, **options) -> SyncBatchNorm:
    norm = SyncBatchNorm(channels, device=device, **options)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(channels) + 0.5)
    return norm


def shapes_and_splits(device):
    for shape in SHAPES:
        for rows in splits():
            x = torch.randn(sum(rows), *shape, device=device) * 2 + 3
            assert_as_whole(make_norm(shape[0], device), x, rows)


def activations_and_residuals(device):
    rows = splits()[1]
    for activation in (None, "relu", "leaky_relu", "gelu", "silu"):
        for with_residual in (False, True):
            x = torch.randn(sum(rows), 3, 4, 5, device=device)
            residual = torch.randn_like(x) if with_residual else None
            assert_as_whole(make_norm(3, device, activation=activation), x, rows, residual)


def channels_last(device):
    for rows in splits()[:2]:
        for shape, format in (((3, 4, 5), torch.channels_last), ((3, 2, 3, 4),) * 2):
            if not isinstance(format, torch.memory_format):
                format = torch.channels_last_3d
            x = torch.randn(sum(rows), *shape, device=device).to(memory_format=format)
            y = assert_as_whole(
                make_norm(3, device, activation="relu"), x, rows, torch.randn_like(x)
            )
            assert y.is_contiguous(memory_format=format) or not y.numel()


def strided_inputs(device):
    """Sliced input, expanded gradient."""
    rank, _size = place()
    rows = splits()[1]
    wide = torch.randn(sum(rows), 3, 4, 10, device=device)[..., ::2]
    norm, whole = make_norm(3, device), nn.BatchNorm2d(3).double()
    whole.load_state_dict(norm.state_dict())
    mine = part_of(wide, rows, rank).detach()[..., :].requires_grad_()
    theirs = wide.double().cpu().requires_grad_()
    norm(mine).sum().backward()
    y = whole(theirs)
    y.sum().backward()
    assert_near(mine.grad, part_of(theirs.grad, rows, rank))
    assert_near(summed(norm.bias.grad), whole.bias.grad)


def dtypes(device):
    rows = splits()[1]
    for dtype in HALVES:
        for half_parameters in (False, True):
            norm = make_norm(3, device, activation="silu")
            norm = norm.to(dtype) if half_parameters else norm
            x = (torch.randn(sum(rows), 3, 40, device=device) * 2 + 3).to(dtype)
            # The gradients of parameters are summed over ranks that round them, too.
            assert_as_whole(norm, x, rows, tolerance=2 * torch.finfo(dtype).eps)
    norm = make_norm(3, device, dtype=torch.float64)
    x = torch.randn(sum(rows), 3, 4, dtype=torch.float64, device=device) * 1e-3 + 1e4
    assert_as_whole(norm, x, rows, tolerance=1e-8)


def large_means(device):
    """1e4 deviations from zero, and between ranks as well: y within 1e-4."""
    rank, size = place()
    rows = splits()[0]
    for tail in ((), (6, 6)):
        for apart in (0.0, 1e4):
            x = torch.randn(sum(rows), 4, *tail) + 1e4
            for other in range(size):
                part_of(x, rows, other).add_(apart * other)
            norm = make_norm(4, device)
            whole = whole_norm(norm)
            expected = whole(x.double())
            y = norm(part_of(x, rows, rank).to(device))
            found, expected = y.double().cpu(), part_of(expected, rows, rank)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            torch.testing.assert_close(
                norm.running_var.double().cpu(), whole.running_var, rtol=1e-6, atol=0
            )


def constants_and_huge_values(device):
    rank, _size = place()
    rows = splits()[1]
    for value in (3.7, 1e30, -1e4):
        norm = make_norm(3, device)
        x = torch.full((sum(rows), 3, 5), value, device=device)
        y = norm(part_of(x, rows, rank))
        assert torch.equal(y, norm.bias.view(1, 3, 1).expand_as(y))
        assert torch.equal(norm.running_var.cpu(), torch.full((3,), 0.9))
    if device == "cpu":  # PyTorch's operations on CUDA square in float32
        x = torch.randn(sum(rows), 3, 5) * 1e25
        norm = make_norm(3, device, momentum=0.0)
        expected = whole_norm(norm)(x.double())
        assert_near(norm(part_of(x, rows, rank)), part_of(expected, rows, rank))


def what_is_not_finite_stays_in_its_channel(device):
    rank, size = place()
    x = torch.randn(4 * size, 3, 5, device=device)
    x[0, 1, 0] = float("nan")
    norm, whole = make_norm(3, device), nn.BatchNorm1d(3).double()
    whole.load_state_dict(norm.state_dict())
    y, expected = norm(part_of(x, [4] * size, rank)), whole(x.double().cpu())
    assert y[:, 1].isnan().all()
    assert_near(y[:, ::2], part_of(expected, [4] * size, rank)[:, ::2])


def counters_and_momenta(device):
    rows = splits()[1]
    norm = make_norm(3, device, momentum=None)
    for _ in range(3):  # against a copy of the state before each step
        assert_as_whole(norm, torch.randn(sum(rows), 3, 4, device=device), rows)
        norm.zero_grad()
    norm.momentum = 0.5
    for dtype in (torch.int32, torch.float16, torch.float32):
        before = norm.num_batches_tracked.item()
        norm.num_batches_tracked = norm.num_batches_tracked.to(dtype)
        norm(part_of(torch.randn(sum(rows), 3, 4, device=device), rows, place()[0]))
        assert norm.num_batches_tracked.dtype == dtype
        assert norm.num_batches_tracked.item() == before + 1


def options(device):
    rows = splits()[1]
    x = torch.randn(sum(rows), 3, 4, device=device)
    assert_as_whole(make_norm(3, device, affine=False), x, rows)
    assert_as_whole(make_norm(3, device, track_running_stats=False), x, rows)
    assert_as_whole(make_norm(3, device, eps=0.3), x, rows)


def all_ranks_empty(device):
    norm = make_norm(3, device, momentum=None)
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    x = torch.empty(0, 3, 4, device=device, requires_grad=True)
    with counted() as made:
        y = norm(x)
        y.sum().backward()
    assert made == ["all_gather", "all_reduce"]
    assert y.shape == x.shape == x.grad.shape
    assert all(not parameter.grad.any() for parameter in norm.parameters())
    for name, tensor in norm.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def one_value_per_channel(device):
    rank, _ = place()
    norm = make_norm(3, device)
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    x = torch.randn(1 if rank == 1 else 0, 3, 1, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            norm(x)
    else:
        y = norm(x)
        assert torch.equal(y, norm.bias.view(1, 3, 1).expand_as(y))
    for name, tensor in norm.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    norm(torch.randn(1, 3, 1, device=device))  # one on each rank is enough


def one_collective_a_pass(device):
    x = torch.randn(3, 3, 4, device=device)
    norm = make_norm(3, device)
    for parameter in norm.parameters():
        parameter.requires_grad_(False)
    for asked in ((norm.weight,), (norm.bias,), (x,)):
        for tensor in asked:
            tensor.requires_grad_()
        with counted() as made:
            norm(x).sum().backward()
        assert made == ["all_gather", "all_reduce"]
    with counted() as made, torch.no_grad():
        norm(x)
    assert made == ["all_gather"]


def eval_takes_none(device):
    rank, _ = place()
    x = torch.randn(3 + rank, 3, 4, device=device)
    for options in ({}, {"track_running_stats": False}):
        norm = make_norm(3, device, **options).eval()
        with counted() as made:
            y = norm(x.requires_grad_())
            y.sum().backward()
        assert made == []
        local = whole_norm(norm).eval()
        assert_near(y, local(x.detach().double().cpu()))


def second_gradients(device):
    rank, _ = place()
    for rows in splits():
        for activation, with_residual in ((None, False), ("silu", True)):
            norm = make_norm(3, device, activation=activation, dtype=torch.float64)
            whole = whole_norm(norm)
            x = torch.randn(sum(rows), 3, 4, dtype=torch.float64)
            results = []
            for layer, input in ((norm, part_of(x, rows, rank).to(device)), (whole, x.clone())):
                input.requires_grad_()
                if layer is norm:
                    y = layer(input, input if with_residual else None)
                else:
                    y = layer(input) + input if with_residual else layer(input)
                    y = nn.functional.silu(y) if activation else y
                (first,) = torch.autograd.grad(y.pow(3).sum(), input, create_graph=True)
                first.square().sum().backward()
                results.append((first, input.grad))
            for ours, theirs in zip(*results, strict=True):
                assert_near(ours, part_of(theirs, rows, rank), 1e-9)
            assert_near(summed(norm.weight.grad), whole.weight.grad, 1e-9)


TASKS = (
    shapes_and_splits,
    activations_and_residuals,
    channels_last,
    strided_inputs,
    dtypes,
    large_means,
    constants_and_huge_values,
    what_is_not_finite_stays_in_its_channel,
    counters_and_momenta,
    options,
    all_ranks_empty,
    one_value_per_channel,
    one_collective_a_pass,
    eval_takes_none,
    second_gradients,
)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("processes", SPLITS)
@pytest.mark.parametrize("task", [task.__name__ for task in TASKS])
def test_processes(task, processes, device):
    report = reports(TASKS, processes, device)[task]
    assert not report, report
