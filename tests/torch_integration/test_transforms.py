"""torch.func, forward mode, batched gradients and torch.export: right, or a clear error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from linear_cases import TRAINING, max_error
from torch.autograd import forward_ad

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d, explain, functional

KINDS = pytest.mark.parametrize("kind", ["conv", "linear"])


def layer(kind: str, device: str):
    """(ours, PyTorch's, an input): functions of the input, in training mode, without buffers."""
    generator = torch.Generator().manual_seed(0)
    if kind == "conv":
        weight, x = torch.rand(4, generator=generator), torch.randn(3, 4, 5, 5, generator=generator)
        weight, x = weight.to(device), x.to(device)
        return (
            lambda x: functional.batch_norm(x, None, None, weight, training=True),
            lambda x: F.batch_norm(x, None, None, weight.to(x.dtype), training=True),
            x,
        )
    weight, x = torch.randn(5, 6, generator=generator), torch.randn(9, 6, generator=generator)
    weight, x = weight.to(device), x.to(device)
    return (
        lambda x: functional.linear_batch_norm(x, weight, training=True, activation="silu"),
        lambda x: F.silu(F.batch_norm(x @ weight.t().to(x.dtype), None, None, training=True)),
        x,
    )


@KINDS
def test_vmap(kind, device):
    ours, theirs, x = layer(kind, device)
    batch = torch.stack([x, 2 * x + 1, x.flip(0)])
    expected = torch.stack([theirs(sample.double()) for sample in batch])
    assert max_error(torch.func.vmap(ours)(batch), expected) < 1e-5


@KINDS
def test_gradients_and_tangents(kind, device):
    ours, theirs, x = layer(kind, device)
    tangent = torch.randn_like(x)

    def loss(function):
        return lambda x: function(x).pow(3).sum()

    wide = x.double()
    assert max_error(torch.func.grad(loss(ours))(x), torch.func.grad(loss(theirs))(wide)) < 1e-5
    _, dy = torch.func.jvp(ours, (x,), (tangent,))
    _, expected = torch.autograd.functional.jvp(theirs, wide, tangent.double())
    assert max_error(dy, expected) < 1e-5
    with forward_ad.dual_level():
        y = ours(forward_ad.make_dual(x, tangent))
        assert max_error(forward_ad.unpack_dual(y).tangent, expected) < 1e-5


@KINDS
def test_buffers_take_no_tangents(kind, device):
    module = (BatchNorm2d(4) if kind == "conv" else LinearBatchNorm1d(6, 5)).to(device)
    x = layer(kind, device)[2]
    with forward_ad.dual_level():
        module(forward_ad.make_dual(x, x))
        assert all(forward_ad.unpack_dual(buffer).tangent is None for buffer in module.buffers())


@KINDS
def test_batched_gradients(kind, device):
    """is_grads_batched, by which torch.autograd.functional.jacobian vectorises."""
    ours, theirs, x = layer(kind, device)
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    y = ours(x)
    directions = torch.randn(3, *y.shape, device=device)
    (batched,) = torch.autograd.grad(y, x, directions, is_grads_batched=True)
    (expected,) = torch.autograd.grad(
        theirs(wide), wide, directions.double(), is_grads_batched=True
    )
    assert max_error(batched, expected) < 1e-5


@KINDS
def test_running_statistics_of_a_batched_input_are_refused(kind, device):
    module = (BatchNorm2d(4) if kind == "conv" else LinearBatchNorm1d(6, 5)).to(device)
    x = layer(kind, device)[2]
    before = [buffer.clone() for buffer in module.buffers()]
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(module)(torch.stack([x, x]))
    assert all(map(torch.equal, list(module.buffers())[:2], before[:2]))


def test_explain_says_so(device):
    module, x = BatchNorm2d(4).to(device), torch.randn(3, 4, 5, 5, device=device)
    with forward_ad.dual_level():
        assert explain(module, x).path == "reference"
    if device == "cuda":
        assert explain(module, x).path == "kernels"


@TRAINING
@KINDS
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_export(strict, kind, training, device):
    module = (
        (BatchNorm2d(4) if kind == "conv" else LinearBatchNorm1d(6, 5, scale=True))
        .to(device)
        .train(training)
    )
    x = layer(kind, device)[2]
    eager = copy.deepcopy(module)
    exported = torch.export.export(module, (x,), strict=strict).module()
    for _ in range(2):
        assert max_error(exported(x), eager(x)) < 1e-5
    for name, buffer in exported.named_buffers():  # in eval without the counter, which nothing uses
        assert max_error(buffer, eager.get_buffer(name)) < 1e-5, name
