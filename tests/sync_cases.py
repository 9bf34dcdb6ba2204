"""Synchronised layers, against one process that has the whole batch, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from processes import assert_same_bits
from torch import Tensor, nn

from cutlass_bn._activations import ACTIVATIONS
from cutlass_bn.functional import _sync_batch_norm


def place(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def part_of(tensor: Tensor, rows: Sequence[int], rank: int) -> Tensor:
    """This rank's own rows of a whole batch, which has the same values on all ranks."""
    start = sum(rows[:rank])
    return tensor[start : start + rows[rank]]


def whole_norm(norm: nn.Module) -> nn.Module:
    """torch's, in float64, with the same state."""
    # A class that takes inputs of any rank, and computes alone.
    whole = nn.modules.batchnorm._BatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    )
    whole._check_input_dim = lambda input: None
    whole.load_state_dict(copy.deepcopy(norm.state_dict()))
    return whole.double().train(norm.training)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives of our functions."""
    made: list[str] = []
    real = {name: getattr(_sync_batch_norm, name) for name in ("all_gather", "all_reduce")}

    def noting(name):
        def collective(*args):
            made.append(name)
            return real[name](*args)

        return collective

    for name in real:
        setattr(_sync_batch_norm, name, noting(name))
    try:
        yield made
    finally:
        for name, function in real.items():
            setattr(_sync_batch_norm, name, function)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """tolerance: relative to the largest value, and to each."""
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    atol = tolerance * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.double().cpu(), expected.cpu(), rtol=tolerance, atol=atol)


def summed(gradient: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Local gradients of a parameter add up to that of the whole batch."""
    total = gradient.double().cpu()
    dist.all_reduce(total, group=group)
    return total


def assert_as_whole(
    norm: nn.Module,
    x: Tensor,
    rows: Sequence[int],
    residual: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    tolerance: float = 1e-5,
) -> Tensor:
    """One step of a synchronised norm, x and residual being whole batches; the local output."""
    rank, _ = place(group)
    whole, activation = whole_norm(norm), norm.activation
    weights = torch.randn(x.shape, device=x.device).to(x.dtype)
    mine = part_of(x, rows, rank).detach().requires_grad_()
    my_residual = None
    if residual is not None:
        my_residual = part_of(residual, rows, rank).detach().requires_grad_()
    y = norm(mine, my_residual)
    (y * part_of(weights, rows, rank)).sum().backward()

    theirs = x.detach().double().cpu().requires_grad_()
    their_residual = None if residual is None else residual.detach().double().cpu()
    expected = whole(theirs)
    if their_residual is not None:
        expected = expected + their_residual.requires_grad_()
    expected = ACTIVATIONS[activation].forward(expected)
    (expected * weights.double().cpu()).sum().backward()

    assert y.dtype == x.dtype
    assert_near(y, part_of(expected, rows, rank), tolerance)
    if y.numel():
        assert y.stride() == mine.grad.stride() == torch.empty_like(mine).stride()
    pairs = (
        [(mine, theirs)] if residual is None else [(mine, theirs), (my_residual, their_residual)]
    )
    for ours, reference in pairs:
        assert_near(ours.grad, part_of(reference.grad, rows, rank), 10 * tolerance)
    for (name, ours), reference in zip(norm.named_parameters(), whole.parameters(), strict=True):
        assert ours.grad.dtype == ours.dtype, name
        assert_near(summed(ours.grad, group), reference.grad, 10 * tolerance)
    for (_, ours), reference in zip(norm.named_buffers(), whole.buffers(), strict=True):
        assert_near(ours, reference.double(), max(tolerance, torch.finfo(x.dtype).eps))
        if group is None:
            assert_same_bits(ours)
    return y
