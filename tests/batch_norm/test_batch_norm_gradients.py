"""Gradients of functional.batch_norm against float64, on the CPU path and on CUDA."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from batch_norm_cases import Case
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cutlass_bn.functional import batch_norm

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


CASES = [
    Case((4, 6, 12, 10), "usual"),
    Case((4, 6, 12, 10), "channels last", channels_last=True),
    Case((4, 6, 12, 10), "bf16", BF16),
    Case((4, 6, 12, 10), "fp16 channels last", F16, channels_last=True),
    Case((4, 6, 12, 10), "mean far from zero", mean=1e4),
    Case((4, 6, 12, 10), "without weight and bias", affine=False),
    Case((16, 5), "two dimensions"),
    Case((3, 4, 5, 6, 2), "five dimensions"),
]


def inputs_of(case: Case, device: str) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    x = (torch.randn(case.sizes, dtype=torch.float64) * case.std + case.mean).to(device, case.dtype)
    grad = torch.randn(case.sizes, dtype=torch.float64).to(device, case.dtype)
    if case.channels_last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias = (
        ((torch.rand(case.sizes[1]) + 0.5).to(device), torch.randn(case.sizes[1]).to(device))
        if case.affine
        else (None, None)
    )
    return x, weight, bias, grad


def gradients(function, tensors, grad, training, buffers) -> list[Tensor]:
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    x, weight, bias = leaves
    wide = x.dtype == torch.float64
    y = function(x, *(b.double() if wide else b.clone() for b in buffers), weight, bias, training)
    y.backward(grad.to(y.dtype))
    return [t.grad for t in leaves if t is not None]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_match_float64(case, training, device):
    x, weight, bias, grad = inputs_of(case, device)
    channels = case.sizes[1]
    buffers = (
        torch.full((channels,), case.mean, device=device),
        torch.full((channels,), 1.7, device=device),
    )
    ours = gradients(batch_norm, (x, weight, bias), grad, training, buffers)
    exact_inputs = [None if t is None else t.double() for t in (x, weight, bias)]
    exact = gradients(F.batch_norm, exact_inputs, grad.double(), training, buffers)
    peers = gradients(F.batch_norm, (x, weight, bias), grad, training, buffers)
    for actual, truth, peer in zip(ours, exact, peers, strict=True):
        oracle.assert_no_worse(actual, truth, peer, factor=4.0)
    assert ours[0].stride() == x.stride()


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["x", "weight", "bias"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_one_gradient_alone(wanted, training, device):
    tensors = [
        torch.randn(4, 3, 6, 6, device=device),
        torch.rand(3, device=device),
        torch.rand(3, device=device),
    ]
    buffers = torch.zeros(3, device=device), torch.ones(3, device=device)
    grad = torch.randn_like(tensors[0])
    expected = gradients(batch_norm, tensors, grad, training, buffers)[wanted]
    tensors[wanted].requires_grad_()
    batch_norm(tensors[0], *buffers, *tensors[1:], training).backward(grad)
    torch.testing.assert_close(tensors[wanted].grad, expected)
    assert all(t.grad is None for i, t in enumerate(tensors) if i != wanted)


GRADS = {
    "expanded": lambda y: torch.ones((), device=y.device).expand_as(y),
    "of the other memory format": lambda y: torch.randn_like(y).to(
        memory_format=torch.channels_last
    ),
    "strided": lambda y: torch.randn(*y.shape[:-1], 2 * y.size(-1), device=y.device)[..., ::2],
}


@pytest.mark.parametrize("layout", GRADS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_layouts_of_the_incoming_gradient(layout, training, device):
    x = torch.randn(4, 3, 6, 8, device=device)
    grad = GRADS[layout](x)
    buffers = torch.zeros(3, device=device), torch.ones(3, device=device)
    tensors = (x, torch.rand(3, device=device), torch.rand(3, device=device))
    expected = gradients(batch_norm, tensors, grad.contiguous(), training, buffers)
    for actual, wanted in zip(
        gradients(batch_norm, tensors, grad, training, buffers), expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_input_that_is_a_view(training, device):
    whole = torch.randn(4, 8, 6, 6, device=device, requires_grad=True)
    tensors = (whole.detach()[:, 2:5].contiguous(), None, None)
    buffers = torch.zeros(3, device=device), torch.ones(3, device=device)
    grad = torch.randn(4, 3, 6, 6, device=device)
    (expected,) = gradients(batch_norm, tensors, grad, training, buffers)
    batch_norm(whole[:, 2:5], *buffers, training=training).backward(grad)
    torch.testing.assert_close(whole.grad[:, 2:5], expected)
    assert (whole.grad[:, [0, 1, 5, 6, 7]] == 0).all()


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_buffers_may_change_before_the_backward(training, device):
    """Distributed data parallel broadcasts them, and a second forward updates them."""
    tensors = (
        torch.randn(4, 3, 6, 6, device=device),
        torch.rand(3, device=device),
        torch.rand(3, device=device),
    )
    buffers = [torch.zeros(3, device=device), torch.ones(3, device=device)]
    grad = torch.randn_like(tensors[0])
    expected = gradients(batch_norm, tensors, grad, training, buffers)
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = batch_norm(leaves[0], *buffers, *leaves[1:], training)
    for buffer in buffers:
        buffer.fill_(float("nan"))
    y.backward(grad)
    for leaf, wanted in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, wanted)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 3, 0, 4)], ids=str)
def test_empty_input(shape, training, device):
    x = torch.empty(shape, device=device, requires_grad=True)
    weight, bias = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    y = batch_norm(x, mean, var, weight, bias, training)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    for gradient in (weight.grad, bias.grad):
        assert torch.equal(gradient, torch.zeros(3, device=device))
    assert torch.equal(mean, torch.zeros(3, device=device))
    assert torch.equal(var, torch.ones(3, device=device))


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_double_backward(training, device):
    """A gradient penalty, say."""

    def penalty(function, dtype) -> list[Tensor]:
        torch.manual_seed(1)
        tensors = [torch.randn(4, 3, 5, 5), torch.rand(3) + 0.5, torch.rand(3)]
        leaves = [t.to(device, dtype).requires_grad_() for t in tensors]
        buffers = [t.to(device, dtype) for t in (torch.zeros(3), torch.full((3,), 1.5))]
        y = function(leaves[0], *buffers, *leaves[1:], training)
        first = torch.autograd.grad(y.pow(3).mean(), leaves, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        return [t.grad for t in leaves]

    for actual, truth in zip(
        penalty(batch_norm, F32), penalty(F.batch_norm, torch.float64), strict=True
    ):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_checkpointing(training, device):
    tensors = (
        torch.randn(4, 3, 6, 6, device=device),
        torch.rand(3, device=device),
        torch.rand(3, device=device),
    )
    buffers = torch.zeros(3, device=device), torch.ones(3, device=device)
    grad = torch.randn_like(tensors[0])

    def checkpointed(x, mean, var, weight, bias, training):
        def layer(*differentiable):
            return batch_norm(differentiable[0], mean, var, *differentiable[1:], training)

        return checkpoint(layer, x, weight, bias, use_reentrant=False)

    for actual, wanted in zip(
        gradients(checkpointed, tensors, grad, training, buffers),
        gradients(batch_norm, tensors, grad, training, buffers),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast(dtype, device):
    """x keeps its dtype, parameters float32 gradients; the backward is outside autocast."""
    convolution = torch.nn.Conv2d(3, 4, 3, device=device)
    weight, bias = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))
    with torch.autocast(device, dtype=dtype):
        h = convolution(torch.randn(2, 3, 8, 8, device=device))
        y = batch_norm(h, None, None, weight, bias, training=True)
    assert h.dtype == y.dtype == dtype
    y.float().square().sum().backward()
    assert weight.grad.dtype == bias.grad.dtype == convolution.weight.grad.dtype == F32
