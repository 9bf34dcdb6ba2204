"""The batch-norm ops with an activation and a residual behind the normalisation, on a GPU, against
float64."""

import itertools
from collections.abc import Iterator

import oracle
import pytest
import torch
from activation_cases import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    FEW_LAYOUTS,
    GRADIENTS,
    LAYOUTS,
    TWO_PASSES,
    Arguments,
    Layout,
    make,
    strides_of_output,
)

from cutlass_bn import library_is_loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library_is_loaded(), reason="needs the compiled library"),
]


def assert_right(a: Arguments, factor: float = 2.0) -> None:
    y, stats = a.forward()
    assert y.dtype == a.x.dtype
    assert y.stride() == strides_of_output(a.x)
    torch_y, torch_gradients = a.chain(a.x.dtype, None)
    exact_y, _ = a.chain(torch.float64, None)
    oracle.assert_no_worse(y, exact_y, torch_y, factor)
    wanted = a.gradients_of(GRADIENTS)
    actual = a.backward(y, stats, *wanted)
    _, exact = a.chain(torch.float64, y)
    _, exact_for_torch = a.chain(torch.float64, torch_y)
    for name in wanted:
        scale = 0.0
        if name in ("dweight", "dbias"):
            scale = oracle.spread(a.dy)
        theirs = oracle.error(torch_gradients[name], exact_for_torch[name], scale)
        ours = oracle.error(actual[name], exact[name], scale)
        allowed = factor * max(theirs, 1.5 * torch.finfo(actual[name].dtype).eps)
        assert ours <= allowed, f"{name}: error {ours:.3e}, PyTorch's {theirs:.3e}"
        if name in ("dx", "dresidual"):
            assert actual[name].stride() == strides_of_output(a.x)


def kernels() -> Iterator[tuple[Layout, torch.dtype, str]]:
    """Every kernel: relu and leaky_relu share theirs, gelu and silu too; float16 is bfloat16's."""
    for layout in LAYOUTS:
        few = layout in FEW_LAYOUTS
        for activation in ACTIVATIONS if few else ("none", "relu", "gelu"):
            yield from ((layout, dtype, activation) for dtype in (F32, BF16))
        if few:
            yield layout, F16, "relu"


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize(("layout", "dtype", "activation"), kernels(), ids=str)
def test_against_float64(layout, dtype, activation, with_residual, training):
    assert_right(make(layout, dtype, activation, with_residual, training))


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_large_channels(dtype, activation, with_residual):
    layout = TWO_PASSES if dtype == F32 else Layout((128, 2, 256, 256), "in two passes, half")
    assert_right(make(layout, dtype, activation, with_residual, True))


SUBSETS = [subset for n in range(5) for subset in itertools.combinations(GRADIENTS, n)]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", FEW_LAYOUTS, ids=str)
def test_only_what_is_asked_for(layout, activation, with_residual, training):
    """Any subset has the values that all have, and reads nothing that it is not given."""
    a = make(layout, BF16, activation, with_residual, training)
    y, stats = a.forward()
    every = a.backward(y, stats, *a.gradients_of(GRADIENTS))
    for subset in SUBSETS:
        wanted = a.gradients_of(subset)
        for name, gradient in a.backward(y, stats, *wanted).items():
            # Two passes round dv where it is stored; sums on chip run in another order.
            near = torch.finfo(gradient.dtype).eps * 8 * every[name].abs().max().item()
            if name in ("dweight", "dbias"):
                near = 1e-2 * oracle.spread(a.dy)
            torch.testing.assert_close(gradient, every[name], rtol=0.0, atol=near)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("layout", FEW_LAYOUTS, ids=str)
def test_mean_far_from_zero(layout, with_residual, activation):
    a = make(layout, F32, activation, with_residual, True, mean=1e4)
    a.weight = torch.ones_like(a.weight)
    y, stats = a.forward()
    exact, _ = a.chain(torch.float64, None)
    assert (y - exact).abs().max() < 2**-23 * 1e4 / 1.5 * 1.2 + 1e-4
    gradients = a.backward(y, stats, *a.gradients_of(GRADIENTS))
    _, exact_gradients = a.chain(torch.float64, y)
    _, torch_gradients = a.chain(F32, None)
    for name, gradient in gradients.items():
        scale = oracle.spread(a.dy) if name in ("dweight", "dbias") else 0.0
        oracle.assert_no_worse(
            gradient, exact_gradients[name], torch_gradients[name], 3.0, max(scale, 1.0)
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("layout", FEW_LAYOUTS, ids=str)
def test_constant_channels(layout, dtype, activation):
    """y is activation(bias + residual) exactly."""
    a = make(layout, dtype, activation, True, True)
    a.x = (
        torch.empty_like(a.x).copy_(
            torch.randn(layout.sizes[1], device="cuda")
            .mul_(100)
            .view([1, -1] + [1] * (len(layout.sizes) - 2))
            .expand(layout.sizes)
        )
        if layout.offset == 0
        else a.x
    )
    y, stats = a.forward()
    v = oracle.per_channel(a.bias, a.x) + a.residual.float()
    expected = ACTIVATIONS[activation](v.double())
    bound = torch.finfo(dtype).eps * expected.abs() + 1e-6
    assert ((y - expected).abs() <= bound).all()
    for gradient in a.backward(y, stats, *a.gradients_of(GRADIENTS)).values():
        assert gradient.isfinite().all()
