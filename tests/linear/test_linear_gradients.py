"""Gradients of functional.linear_batch_norm, first and second, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_cases import (
    ACTIVATIONS,
    BF16,
    FP16,
    TRAINING,
    Case,
    Layer,
    assert_no_worse,
    fused,
    gradients,
    make_layer,
    max_error,
    unfused,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cutlass_bn import functional

CASES = [
    Case(65, 40, 24, "everything present"),
    Case(65, 40, 24, "everything present", activation="gelu"),
    Case(64, 33, 17, "odd sizes", bias=False, activation="silu"),
    Case(300, 136, 40, "several row steps", activation="relu"),
    Case(300, 136, 40, "several row steps", activation="leaky_relu"),
    Case(
        77,
        35,
        24,
        "bf16, odd N: rows of u and of its gradient are padded",
        BF16,
        scale=False,
        activation="silu",
    ),
    Case(77, 35, 24, "fp16, odd N, fp32 out", FP16, activation="gelu"),
    Case(64, 32, 16, "no scale, no affine", scale=False, affine=False, activation="relu"),
    Case(96, 40, 32, "bf16 with fp32 parameters", BF16, activation="relu"),
    Case(96, 40, 32, "bf16 throughout", BF16, scale=False, parameter_dtype=BF16),
    Case(96, 40, 32, "fp16 with fp32 parameters", FP16, scale=False, activation="gelu"),
]


@TRAINING
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_match_float64(case, training, device):
    layer = make_layer(case, device)
    dy = torch.randn(case.m, case.n, generator=torch.Generator().manual_seed(1)).to(device)
    exact = gradients(unfused, layer.double(), training, dy)
    peer = gradients(unfused, layer.clone(), training, dy)
    ours = gradients(fused, layer.clone(), training, dy)
    for name, gradient in ours.items():
        assert gradient.dtype == getattr(layer, name).dtype, name
        if training and name in ("bias", "scale"):
            continue  # what is left after cancellation; see below
        assert_no_worse(gradient, peer[name], exact[name], floor=3e-6, what=name)


def test_bias_gradient_is_zero_in_training(device):
    layer = make_layer(CASES[0], device)
    dy = torch.randn(CASES[0].m, CASES[0].n, device=device)
    bias = gradients(fused, layer, True, dy)["bias"]
    assert torch.equal(bias, torch.zeros_like(bias))


def test_scale_gradient_in_training(device):
    """Normalising undoes the scale, so its gradient is what eps leaves: compared at a large eps."""
    case = Case(65, 40, 24, "a large eps", activation="silu")
    layer = make_layer(case, device)
    dy = torch.randn(case.m, case.n, device=device)
    exact = layer.double().requires_grad()
    (expected,) = torch.autograd.grad(unfused(exact, True, eps=1.0), exact.scale, dy.double())
    layer.requires_grad()
    y = functional.linear_batch_norm(**layer.arguments(), training=True, eps=1.0)
    (scale,) = torch.autograd.grad(y, layer.scale, dy)
    assert max_error(scale, expected) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_scale_gradient_does_not_cancel(activation):
    """At a usual eps next to nothing is left of its terms: by float32 subtraction, only noise."""
    case = Case(200, 40, 24, "a usual eps", activation=activation)
    layer = make_layer(case, "cuda")
    dy = torch.randn(case.m, case.n, device="cuda")
    exact = gradients(unfused, layer.double(), True, dy)["scale"]
    assert max_error(gradients(fused, layer, True, dy)["scale"], exact) < 2e-5


@TRAINING
def test_gradient_at_scale_zero(training, device):
    """z is constant and dy/dscale isn't 0: that needs an unscaled u, or exact formulas."""
    case = Case(65, 8, 24, "scale zero")
    layer = make_layer(case, device)
    layer.scale.zero_()
    dy = torch.randn(case.m, case.n, device=device)
    exact = gradients(unfused, layer.double(), training, dy)
    ours = gradients(fused, layer, training, dy)
    assert max_error(ours["scale"], exact["scale"]) < 1e-5
    assert torch.equal(ours["weight"], torch.zeros_like(layer.weight))
    assert torch.equal(ours["input"], torch.zeros_like(layer.input))


@TRAINING
@pytest.mark.parametrize("wanted", Layer.NAMES)
def test_one_gradient_alone(wanted, training, device):
    case = Case(40, 24, 16, "only one input asks", activation="relu")
    dy = torch.randn(case.m, case.n, device=device)
    everything = gradients(fused, make_layer(case, device), training, dy)
    layer = make_layer(case, device)
    getattr(layer, wanted).requires_grad_()
    fused(layer, training).backward(dy)
    assert (
        max_error(getattr(layer, wanted).grad, everything[wanted]) < 1e-6
        or not everything[wanted].any()
    )
    assert all(t.grad is None for name, t in layer.differentiable().items() if name != wanted)


@TRAINING
def test_strided_output_gradients(training, device):
    case = Case(40, 24, 16, "expanded and transposed")
    for dy in (
        torch.ones((), device=device).expand(40, 24),
        torch.randn(24, 40, device=device).t(),
    ):
        exact = gradients(unfused, make_layer(case, device).double(), training, dy)
        ours = gradients(fused, make_layer(case, device), training, dy)
        constant = dy.stride() == (0, 0)  # in training nothing of it gets through the normalisation
        for name in ("beta",) if training and constant else ("input", "weight", "gamma", "beta"):
            assert max_error(ours[name], exact[name]) < 1e-5, name


@TRAINING
def test_buffers_may_change_before_the_backward(training, device):
    case = Case(40, 24, 16, "a broadcast of buffers between forward and backward")
    dy = torch.randn(case.m, case.n, device=device)
    expected = gradients(fused, make_layer(case, device), training, dy)
    layer = make_layer(case, device).requires_grad()
    y = fused(layer, training)
    layer.running_mean.fill_(7.0)
    layer.running_var.fill_(7.0)
    y.backward(dy)
    for name, tensor in layer.differentiable().items():
        assert torch.equal(tensor.grad, expected[name]), name


@TRAINING
@pytest.mark.parametrize("activation", [None, "gelu", "silu", "leaky_relu"])
def test_gradcheck(activation, training):
    """CPU, float64: first and second derivatives by finite differences."""
    layer = (
        make_layer(Case(5, 3, 4, "small", activation=activation), "cpu").double().requires_grad()
    )
    names = list(layer.differentiable())

    def function(*tensors: Tensor) -> Tensor:
        return fused(
            replace(layer.map(torch.clone), **dict(zip(names, tensors, strict=True))), training
        )

    values = tuple(layer.differentiable().values())
    assert torch.autograd.gradcheck(function, values)
    assert torch.autograd.gradgradcheck(function, values)


@TRAINING
@pytest.mark.parametrize("activation", [None, "silu"])
def test_double_backward(activation, training, device):
    """A gradient penalty, as in WGAN-GP: the norm of dx, differentiated by every parameter."""
    case = Case(24, 16, 12, "double backward", activation=activation)

    def penalty(function, layer: Layer) -> dict[str, Tensor]:
        y = function(layer.requires_grad(), training)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), layer.input, create_graph=True)
        leaves = {k: v for k, v in layer.differentiable().items() if k != "bias"}
        found = torch.autograd.grad(dx.square().sum(), list(leaves.values()), allow_unused=True)
        return {k: v for k, v in zip(leaves, found, strict=True) if v is not None}

    exact = penalty(unfused, make_layer(case, device).double())
    ours, peers = (
        penalty(fused, make_layer(case, device)),
        penalty(unfused, make_layer(case, device)),
    )
    for name, gradient in exact.items():
        if not (training and name == "scale"):
            assert_no_worse(ours[name], peers[name], gradient, floor=1e-5, what=name)


@TRAINING
def test_a_batch_of_gradients(training, device):
    layer = make_layer(
        Case(40, 24, 16, "several gradients at once", activation="gelu"), device
    ).requires_grad()
    leaves = list(layer.differentiable().values())
    y = fused(layer, training)
    dys = torch.randn(3, *y.shape, device=device)
    batched = torch.autograd.grad(y, leaves, dys, retain_graph=True, is_grads_batched=True)
    for i, dy in enumerate(dys):
        for together, alone in zip(
            batched, torch.autograd.grad(y, leaves, dy, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(together[i], alone, rtol=1e-5, atol=1e-5)


@TRAINING
def test_checkpointing(training, device):
    case = Case(40, 24, 16, "recomputed in the backward", activation="gelu")
    dy = torch.randn(case.m, case.n, device=device)
    expected = gradients(fused, make_layer(case, device), training, dy)
    layer = make_layer(case, device).requires_grad()
    checkpoint(fused, layer, training, use_reentrant=False).backward(dy)
    for name, tensor in layer.differentiable().items():
        assert torch.equal(tensor.grad, expected[name]), name
