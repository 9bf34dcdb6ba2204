"""LinearBatchNorm1d over a process group, against one process with the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from processes import assert_same_bits, needs_gloo, reports
from sync_cases import assert_near, counted, part_of, place, summed
from torch import nn

from cutlass_bn import LinearBatchNorm1d, SyncBatchNorm, convert, explain
from cutlass_bn._activations import ACTIVATIONS

ROWS = ((6, 6), (1, 9), (0, 8))
K, N = 7, 5


def make_layer(device: str, process_group="world", **options) -> LinearBatchNorm1d:
    layer = LinearBatchNorm1d(K, N, process_group=process_group, device=device, **options)
    with torch.no_grad():
        for parameter in layer.bn.parameters():
            parameter.copy_(torch.rand(N) + 0.5)
    return layer


def whole_layer(layer: LinearBatchNorm1d):
    """Separate modules of torch's in float64: parameters, buffers and the forward."""
    gemm, norm = copy.deepcopy(layer.gemm).double().cpu(), nn.BatchNorm1d(N).double()
    norm.eps, norm.momentum = layer.bn.eps, layer.bn.momentum
    norm.load_state_dict(layer.bn.state_dict())
    scale = None if layer.scale is None else nn.Parameter(layer.scale.detach().double().cpu())

    def forward(x):
        z = gemm(x)
        z = norm(z if scale is None else z * scale)
        return ACTIVATIONS[layer.activation].forward(z)

    named = {f"gemm.{name}": p for name, p in gemm.named_parameters()}
    named |= {f"bn.{name}": p for name, p in norm.named_parameters()}
    return named if scale is None else {**named, "scale": scale}, norm, forward


def assert_layer_as_whole(layer, rows, device, dtype=torch.float32, tolerance=1e-5, mean=0.0):
    rank, _ = place()
    parameters, norm, forward = whole_layer(layer)
    x = (torch.randn(sum(rows), K) + mean).to(dtype)
    weights = torch.randn(sum(rows), N)
    mine = part_of(x, rows, rank).to(device).requires_grad_()
    theirs = x.double().requires_grad_()
    y = layer(mine)
    (y.float() * part_of(weights, rows, rank).to(device)).sum().backward()
    expected = forward(theirs)
    (expected * weights.double()).sum().backward()
    assert_near(y, part_of(expected, rows, rank), tolerance)
    assert_near(mine.grad, part_of(theirs.grad, rows, rank), 10 * tolerance)
    for name, parameter in layer.named_parameters():
        assert_near(summed(parameter.grad), parameters[name].grad, 10 * tolerance)
    assert layer.gemm.bias is None or not layer.gemm.bias.grad.any()
    for ours, reference in zip(layer.bn.buffers(), norm.buffers(), strict=True):
        assert_near(ours, reference.double(), tolerance)
        assert_same_bits(ours)


def layers(device):
    for rows in ROWS:
        for options in (
            {},
            {"bias": False, "activation": "relu"},
            {"scale": True, "activation": "gelu"},
            {"scale": True, "activation": "silu", "momentum": 1.0, "eps": 0.1},
        ):
            assert_layer_as_whole(make_layer(device, **options), rows, device)


def a_scale_of_zero(device):
    layer = make_layer(device, scale=True)
    with torch.no_grad():
        layer.scale[1] = 0.0
    assert_layer_as_whole(layer, ROWS[1], device)


def a_large_bias(device):
    layer = make_layer(device)
    with torch.no_grad():
        layer.gemm.bias.fill_(1e5)
    rank, _ = place()
    _, _, forward = whole_layer(layer)
    x = torch.randn(sum(ROWS[1]), K)
    expected = part_of(forward(x.double()), ROWS[1], rank)
    assert_near(layer(part_of(x, ROWS[1], rank).to(device)), expected)


def half_precision(device):
    for dtype in (torch.bfloat16, torch.float16):
        layer = make_layer(device, activation="silu").to(dtype)
        assert_layer_as_whole(layer, ROWS[0], device, dtype, 4 * torch.finfo(dtype).eps)
        layer = make_layer(device, scale=True)
        rank, _ = place()
        x = part_of(torch.randn(sum(ROWS[1]), K), ROWS[1], rank).to(device)
        with torch.autocast(device, dtype):
            y = layer(x)
        y.float().square().sum().backward()
        assert y.dtype == torch.float32  # the product is of dtype, and the scale promotes it
        assert layer.gemm.weight.grad.dtype == torch.float32
        assert torch.isfinite(layer.gemm.weight.grad).all()
        assert_same_bits(layer.bn.running_mean)


def one_collective_a_pass(device):
    layer, x = make_layer(device, scale=True), torch.randn(4, K, device=device)
    with counted() as made:
        layer(x).sum().backward()
    assert made == ["all_gather", "all_reduce"]
    with counted() as made:
        layer.eval()(x).sum().backward()
    assert made == []


def torchs_norm_is_synchronised(device):
    """As torch's and Lightning's conversions leave it."""
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(make_layer(device, None))
    assert type(layer.bn) is nn.SyncBatchNorm
    assert layer.process_group == "world"
    assert_layer_as_whole(layer, ROWS[1], device)
    assert "synchronised over 2 ranks" in str(explain(layer, torch.ones(2, K, device=device)))


def unfused_it_is_synchronised(device):
    """A hook on a child, and an input of three dimensions."""
    rank, _ = place()
    layer = make_layer(device)
    layer.bn.register_forward_hook(lambda *_: None)
    with counted() as made:
        layer(torch.randn(2 + rank, K, device=device)).sum().backward()
    assert made == ["all_gather", "all_reduce"]
    layer = make_layer(device)
    with counted() as made:
        layer(torch.randn(2 + rank, N, K, device=device))
    assert made == ["all_gather"]


def neighbours_in_a_sequential(device):
    rank, _ = place()
    model = nn.Sequential(nn.Linear(K, N), SyncBatchNorm(N), nn.SiLU()).to(device)
    converted = convert(copy.deepcopy(model))
    assert "Linear + SyncBatchNorm + SiLU" in str(explain(converted))
    results = []
    x = torch.randn(3 + 2 * rank, K, device=device)
    for layers in (model, converted):
        y = layers(x)
        y.square().sum().backward()
        results.append((y, *(p.grad for p in layers.parameters()), *layers.buffers()))
    for name, one, other in zip(range(9), *results, strict=False):
        if name != 2:  # of the Linear's bias, a rank's own rounding against zeros
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def a_batch_of_one_row(device):
    layer = make_layer(device)
    rank, _ = place()
    x = torch.randn(1 - rank, K, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            layer(x)
    assert layer.bn.num_batches_tracked.item() == 0


def groups_of_one(device):
    """Each rank alone: the local fused layer."""
    rank, size = place()
    groups = [dist.new_group([other]) for other in range(size)]
    layer = make_layer(device, groups[rank])
    local = make_layer(device, None)
    local.load_state_dict(layer.state_dict())
    x = torch.randn(3 + rank, K, device=device)
    with counted() as made:
        assert torch.equal(layer(x), local(x))
    assert made == []


TASKS = (
    layers,
    a_scale_of_zero,
    a_large_bias,
    half_precision,
    one_collective_a_pass,
    torchs_norm_is_synchronised,
    unfused_it_is_synchronised,
    neighbours_in_a_sequential,
    a_batch_of_one_row,
    groups_of_one,
)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("task", [task.__name__ for task in TASKS])
def test_two_processes(task, device):
    report = reports(TASKS, 2, device)[task]
    assert not report, report
