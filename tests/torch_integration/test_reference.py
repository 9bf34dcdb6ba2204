"""The plain PyTorch definition against PyTorch's own modules in float64, and its derivatives."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from cutlass_bn import reference
from cutlass_bn._activations import ACTIVATIONS

F64 = torch.float64


def vector(n: int, low: float = 0.5, high: float = 2.0) -> torch.Tensor:
    return torch.empty(n, dtype=F64).uniform_(low, high)


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (7, 3), (4, 3, 9), (2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_batch_norm_is_torchs(shape, training, affine):
    x = torch.randn(shape, dtype=F64)
    weight, bias = (vector(3), vector(3)) if affine else (None, None)
    ours, theirs = (torch.zeros(3, dtype=F64), vector(3)), None
    theirs = tuple(t.clone() for t in ours)
    counter = torch.tensor(4)
    y = reference.batch_norm(x, *ours, counter, weight, bias, training, 0.3, 1e-5)
    torch.testing.assert_close(y, F.batch_norm(x, *theirs, weight, bias, training, 0.3, 1e-5))
    torch.testing.assert_close(ours, theirs)
    assert counter.item() == 4 + training


def test_batch_statistics_without_running_ones():
    x = torch.randn(4, 3, 5, dtype=F64)
    y = reference.batch_norm(x, None, None, None, None, None, False, 0.1, 1e-5)
    torch.testing.assert_close(y, F.batch_norm(x, None, None, training=True))


def test_cumulative_average():
    x = torch.randn(3, 8, 2, dtype=F64)
    mean, var, counter = torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64), torch.tensor(0)
    for batch in x:
        reference.batch_norm(batch, mean, var, counter, None, None, True, None, 1e-5)
    torch.testing.assert_close(mean, x.mean((0, 1)))
    torch.testing.assert_close(var, x.var(1).mean(0))


def test_float32_keeps_the_contract_where_torch_does_not():
    x = torch.randn(64, 8, 32, 32) + 1e4
    y = reference.batch_norm(x, None, None, None, None, None, True, 0.1, 1e-5)
    oracle.assert_y_keeps_contract(y, oracle.batch_norm(x))


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("shape", [(3, 2, 2, 2), (5, 2)], ids=str)
def test_batch_norm_derivatives(training, shape):
    mean, var = torch.zeros(2, dtype=F64), vector(2)

    def function(x, weight, bias):
        return reference.batch_norm(
            x, mean.clone(), var.clone(), None, weight, bias, training, 0.1, 1e-3
        )

    inputs = [t.requires_grad_() for t in (torch.randn(shape, dtype=F64), vector(2), vector(2))]
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def separate(x, weight, bias, scale, mean, var, gamma, beta, training, activation):
    z = F.linear(x, weight, bias)
    if scale is not None:
        z = z * scale
    y = F.batch_norm(z, mean, var, gamma, beta, training, 0.3, 1e-5)
    return y if activation is None else getattr(F, activation)(y)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
@pytest.mark.parametrize("scale", [True, False], ids=["scale", "noscale"])
def test_linear_batch_norm_is_the_separate_layers(training, activation, bias, scale):
    x, weight = torch.randn(9, 4, dtype=F64), torch.randn(5, 4, dtype=F64)
    vectors = [vector(5) if bias else None, vector(5, -2, 2) if scale else None]
    ours = (torch.zeros(5, dtype=F64), vector(5))
    theirs = tuple(t.clone() for t in ours)
    gamma, beta = vector(5), vector(5)
    y = reference.linear_batch_norm(
        x, weight, *vectors, *ours, torch.tensor(0), gamma, beta, training, 0.3, 1e-5, activation
    )
    torch.testing.assert_close(
        y, separate(x, weight, *vectors, *theirs, gamma, beta, training, activation)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_linear_batch_norm_derivatives(training, activation):
    mean, var = torch.zeros(2, dtype=F64), vector(2)

    def function(x, weight, bias, scale, gamma, beta):
        return reference.linear_batch_norm(
            x,
            weight,
            bias,
            scale,
            mean.clone(),
            var.clone(),
            None,
            gamma,
            beta,
            training,
            0.1,
            1e-3,
            activation,
        )

    inputs = [
        torch.randn(5, 3, dtype=F64),
        torch.randn(2, 3, dtype=F64),
        *(vector(2) for _ in range(4)),
    ]
    inputs = [t.requires_grad_() for t in inputs]
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_empty_batch_connects_every_gradient(training):
    tensors = [torch.empty(0, 3), torch.randn(2, 3), *(torch.ones(2) for _ in range(4))]
    x, weight, bias, scale, gamma, beta = (t.requires_grad_() for t in tensors)
    mean, var, counter = torch.zeros(2), torch.ones(2), torch.tensor(0)
    y = reference.linear_batch_norm(
        x, weight, bias, scale, mean, var, counter, gamma, beta, training, 0.1, 1e-5, "relu"
    )
    assert y.shape == (0, 2)
    y.sum().backward()
    assert all(t.grad is not None and (t.grad == 0).all() for t in tensors)
    assert torch.equal(mean, torch.zeros(2))
    assert torch.equal(var, torch.ones(2))
    assert counter.item() == training


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "cast"])
def test_a_bias_of_half_precision_belongs_to_what_is_rounded(autocast, dtype, training):
    """One that takes a mean of 1000 away: without it u keeps 3 to 7 bits of its deviation."""
    x, weight = torch.randn(64, 8), torch.randn(5, 8)
    x[:, 0], weight[:, 0] = 31.0, 32.0
    vectors = torch.full((5,), -992.0), torch.randn(5)
    tensors = [t.to(dtype) for t in (x, weight, *vectors)]
    ours = (torch.zeros(5), torch.ones(5))
    theirs = tuple(t.double() for t in ours)
    exact = separate(*(t.double() for t in tensors), *theirs, None, None, training, "silu")
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        x, weight, bias, scale = (t.float() for t in tensors) if autocast else tensors
        y = reference.linear_batch_norm(
            x, weight, bias, scale, *ours, torch.tensor(0), None, None, training, 0.3, 1e-5, "silu"
        )
    assert (y.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()
    for mine, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine.double(), truth, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_gradient_is_zero_in_training(dtype):
    x, weight = torch.randn(6, 3, dtype=dtype), torch.randn(2, 3, dtype=dtype)
    bias = torch.randn(2, dtype=dtype, requires_grad=True)
    reference.linear_batch_norm(
        x, weight, bias, None, None, None, None, None, None, True, 0.1, 1e-5, None
    ).square().sum().backward()
    assert torch.equal(bias.grad, torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("autocast", [torch.bfloat16, None], ids=["autocast", "plain"])
@pytest.mark.parametrize("scale", [True, False], ids=["scale", "noscale"])
def test_dtype_is_that_of_the_separate_layers(autocast, scale):
    x, weight, factor = torch.randn(6, 3), torch.randn(2, 3), torch.randn(2) if scale else None
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y = reference.linear_batch_norm(
            x, weight, None, factor, None, None, None, None, None, True, 0.1, 1e-5, "gelu"
        )
        peer = separate(x, weight, None, factor, None, None, None, None, True, "gelu")
    assert y.dtype == peer.dtype
