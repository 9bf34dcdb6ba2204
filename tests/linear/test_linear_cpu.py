"""The Linear + BatchNorm1d layer on CPU tensors against float64 and PyTorch's own operations."""

from __future__ import annotations

import linear_cases
import pytest
import torch
import torch.nn.functional as F
from linear_cases import ACTIVATIONS, CASES, EPS, TRAINING, Case, Layer, make_layer
from torch import Tensor

from cutlass_bn import cpu
from cutlass_bn._activations import CODES

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
ids = {"ids": str}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def forward(layer: Layer, training: bool, dtype: torch.dtype, momentum: float = 0.1) -> Tensor:
    x, weight, bias, scale = layer.input, layer.weight, layer.bias, layer.scale
    running, affine = (layer.running_mean, layer.running_var), (layer.gamma, layer.beta)
    how = EPS, CODES[layer.activation], dtype, 0
    if not training:
        return cpu.linear_batch_norm_inference(x, weight, bias, scale, *running, *affine, *how)
    buffers = *running, layer.num_batches_tracked
    y, u, stats = cpu.linear_batch_norm_training(
        x, weight, bias, scale, *buffers, *affine, momentum, *how
    )
    assert (u.shape, u.dtype) == (y.shape, x.dtype)
    assert stats.shape == (3, len(weight))
    return y


def run(layer: Layer, training: bool) -> tuple[Layer, Layer, Layer]:
    """y of ours, of PyTorch's in the same dtype and in float64, as `.y` of the updated layers."""
    ours, peer, wide = layer.clone(), layer.clone(), layer.double()
    dtype = (
        torch.promote_types(layer.input.dtype, layer.scale.dtype)
        if layer.scale is not None
        else layer.input.dtype
    )
    ours.y = forward(ours, training, dtype)
    peer.y, wide.y = (linear_cases.unfused(other, training) for other in (peer, wide))
    assert (ours.y.shape, ours.y.dtype) == (wide.y.shape, dtype)
    assert ours.y.is_contiguous()
    return ours, peer, wide


@pytest.mark.parametrize("case", CASES, **ids)
@TRAINING
def test_linear(case, training):
    ours, peer, wide = run(make_layer(case, "cpu"), training)
    for name in ("y", "running_mean", "running_var"):
        actual, theirs, exact = (getattr(layer, name) for layer in (ours, peer, wide))
        linear_cases.assert_no_worse(actual, theirs, exact, what=name)
    assert ours.num_batches_tracked.item() == training


@TRAINING
def test_linear_with_a_large_mean(training):
    """The bias cancels in training; the mean, large beside the deviation, is subtracted first."""
    layer = make_layer(Case(300, 40, 32, ""), "cpu")
    layer.input += 300.0
    layer.bias += 1e4
    layer.scale[3] = 0.0
    z = (layer.input.double() @ layer.weight.double().t() + layer.bias) * layer.scale
    layer.running_mean, layer.running_var = z.mean(0).float(), z.var(0).float()
    ours, _, wide = run(layer, training)
    products = (
        (layer.input.abs() @ layer.weight.abs().t()) * layer.scale.abs() / (z.var(0) + EPS).sqrt()
    )
    rounding = 2**-23 * ((z.mean(0).abs() / (z.var(0) + EPS).sqrt()) + products) + 1e-5
    assert ((ours.y - wide.y).abs() <= layer.gamma.abs() * rounding + 2**-22 * wide.y.abs()).all()
    assert (
        (ours.running_mean - wide.running_mean).abs()
        <= 2**-22 * z.mean(0).abs() + products.amax(0) * 2**-22
    ).all()


@TRAINING
@pytest.mark.parametrize("dtype", [F16, BF16], **ids)
def test_bias_belongs_to_what_half_precision_rounds(training, dtype):
    """It takes a large mean away, in float16 from values that overflow."""
    layer = make_layer(Case(200, 40, 32, "", dtype, parameter_dtype=F32, scale=False), "cpu")
    layer.input[:, 0] = 1.0
    layer.weight[:, 0] = 1000.0 if dtype == BF16 else 6e4
    layer.input[:, 1], layer.weight[:, 1] = layer.input[:, 0], 0.25 * layer.weight[:, 0]
    layer.bias[:] = -layer.weight[:, 0]
    layer.running_mean += layer.weight[:, 1]
    ours, peer, wide = run(layer, training)
    for name in ("y", "running_mean", "running_var"):
        actual, theirs, exact = (getattr(other, name) for other in (ours, peer, wide))
        linear_cases.assert_no_worse(actual, theirs, exact, what=name)


@pytest.mark.parametrize(
    ("case", "mean"),
    [(case, mean) for case in CASES for mean in (0.0, 1e4) if case.dtype == F32 or not mean],
    **ids,
)
@pytest.mark.parametrize(
    "subset",
    [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 1, 0, 0), (0, 0, 0, 1)],
    **ids,
)
def test_linear_gradients(case, mean, subset):
    layer = make_layer(case, "cpu")
    if layer.scale is not None:
        layer.scale[-1] = 0.0
    vectors_ = layer.scale, layer.gamma, layer.beta
    u = (torch.randn(case.m, case.n) + mean).to(case.dtype)
    dtype = (
        case.dtype if layer.scale is None else torch.promote_types(case.dtype, layer.scale.dtype)
    )
    grad = (torch.randn(case.m, case.n) + 0.5).to(dtype)
    var, exact_mean = torch.var_mean(u.double(), 0, correction=0)
    scale = torch.ones(case.n) if layer.scale is None else layer.scale.double()
    stats = torch.stack(
        (exact_mean, exact_mean - exact_mean.float(), (scale.square() * var + EPS).rsqrt())
    ).float()
    asked = [
        v.dtype if wanted and v is not None else None
        for wanted, v in zip(subset[1:], vectors_, strict=True)
    ]
    # With the identity as weight, input's gradient is u's.
    x, weight = torch.randn(case.m, case.n).to(case.dtype), torch.eye(case.n, dtype=case.dtype)
    du, dw, dbias, *found = cpu.linear_batch_norm_backward(
        grad, x, weight, u, stats, *vectors_, EPS, CODES[case.activation], 0,
        bool(subset[0]), bool(subset[0]), F16, *asked,
    )  # fmt: skip
    assert torch.equal(dbias, torch.zeros(case.n, dtype=F16))
    if subset[0]:
        products = du.double().t() @ x.double()
        linear_cases.assert_no_worse(dw, du.t() @ x, products, floor=1e-6)
    else:
        assert dw.shape == (0,)

    def gradients(precise: bool) -> list[Tensor | None]:
        leaves = [
            None if v is None else (v.double() if precise else v).detach() for v in (u, *vectors_)
        ]
        with torch.enable_grad():
            for leaf in leaves:
                _ = None if leaf is None else leaf.requires_grad_()
            z = leaves[0] if leaves[1] is None else leaves[0] * leaves[1]
            y = ACTIVATIONS[case.activation](
                F.batch_norm(z, None, None, *leaves[2:], True, 0.0, EPS)
            )
            wanted = [leaf for leaf in leaves if leaf is not None]
            of_leaves = iter(torch.autograd.grad(y, wanted, grad.to(y.dtype)))
        return [None if leaf is None else next(of_leaves) for leaf in leaves]

    for actual, peer, exact, wanted in zip(
        (du, *found), gradients(False), gradients(True), subset, strict=True
    ):
        if not wanted or exact is None:
            assert actual.shape == (0,)
            continue
        assert actual.dtype == peer.dtype
        linear_cases.assert_no_worse(actual, peer, exact, floor=2e-5)


@TRAINING
def test_linear_of_empty_batch(training):
    layer = make_layer(Case(0, 5, 4, ""), "cpu")
    ours = layer.clone()
    assert forward(ours, training, F32).shape == (0, 5)
    assert ours.num_batches_tracked.item() == training
    assert torch.equal(ours.running_mean, layer.running_mean)
    assert torch.equal(ours.running_var, layer.running_var)
