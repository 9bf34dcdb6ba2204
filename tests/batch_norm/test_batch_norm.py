"""functional.batch_norm against float64: values, layouts, running statistics, bits."""

from dataclasses import dataclass
from functools import partial

import oracle
import pytest
import torch
import torch.nn.functional as F
from batch_norm_cases import Case as BatchNormCase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cutlass_bn.functional import batch_norm

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Case = partial(BatchNormCase, mean=0.3, std=2.0)

CASES = [
    Case((2, 3, 4, 5), "no size a multiple of anything"),
    Case((4, 16, 56, 56), "a usual layer"),
    Case((4, 16, 56, 56), "a usual layer in bf16", BF16),
    Case((4, 16, 56, 56), "a usual layer in fp16", F16),
    Case((4, 64, 28, 28), "channels last", channels_last=True),
    Case((4, 64, 28, 28), "channels last in bf16", BF16, channels_last=True),
    Case((3, 5, 33, 31), "planes of odd size cannot be read in vectors"),
    Case((3, 5, 33, 31), "odd planes in fp16", F16),
    Case((2, 7, 16, 17), "planes just too large for the column kernels"),
    Case((2, 7, 16, 16), "planes just small enough for the column kernels"),
    Case((8, 256, 7, 7), "small odd planes, whole channels in vectors"),
    Case((8, 250, 7, 7), "small odd planes, the last block has channels missing", BF16),
    Case((8, 128, 14, 14), "planes of half vectors", BF16),
    Case((3, 3, 7, 7), "small odd planes, no vectors at all"),
    Case((1, 3, 17, 19), "a single sample"),
    Case((6, 1, 40, 40), "one channel"),
    Case((6, 1, 1, 40), "one channel of small planes"),
    Case((6, 3, 20, 20), "three channels last", channels_last=True),
    Case((40, 3, 1, 1), "planes of one element"),
    Case((64, 136, 1, 1), "one element, a second column block almost empty"),
    Case((2, 2, 300, 300), "several tiles per channel"),
    Case((400, 2, 9, 9), "several tiles per channel in the column kernels"),
    Case((33, 96), "two dimensions"),
    Case((8, 20, 30), "three dimensions"),
    Case((2, 6, 3, 5, 7), "five dimensions"),
    Case((2, 6, 3, 5, 7), "five dimensions channels last", channels_last=True),
    Case((2, 70000, 1, 2), "more channels than a grid dimension has blocks"),
    Case((70000, 2, 1, 3), "more samples than a grid dimension has blocks"),
    Case((4, 8, 24, 24), "misaligned storage", offset=1),
    Case((4, 8, 24, 24), "misaligned storage in fp16", F16, offset=3),
    Case((4, 8, 24, 24), "misaligned channels last", channels_last=True, offset=1),
    Case((4, 8, 32, 32), "mean far from zero", mean=1e4, std=1.0),
    Case(
        (4, 8, 32, 32), "mean far below zero channels last", mean=-1e4, std=1.0, channels_last=True
    ),
    Case((4, 64, 7, 7), "mean far from zero in small planes", mean=1e4, std=1.0),
    Case((2, 2, 300, 300), "mean far from zero in several tiles", mean=1e4, std=1.0),
    Case((4, 8, 40, 40), "fp16 sums that overflow", F16, mean=200.0, std=10.0),
    Case((4, 8, 16, 16), "without weight and bias", affine=False),
    Case((4, 8, 32, 32), "tiny values, eps decides", std=1e-4, mean=0.0),
    Case((4, 300, 20, 20), "more channels than are on chip at a time"),
    Case((5, 7, 12, 43), "planes of two pieces that differ"),
    Case((1, 2, 108, 461), "a last piece of less than a vector a lane"),
    Case((48, 1, 96, 96), "one channel over many blocks"),
    Case((16, 24, 64, 64), "several blocks a channel in bf16", BF16),
    Case((16, 24, 64, 64), "several blocks a channel in fp16", F16),
    Case((16, 6, 64, 64), "mean far from zero over several blocks", mean=1e4, std=1.0),
]


@dataclass
class Layer:
    running_mean: Tensor
    running_var: Tensor
    weight: Tensor | None
    bias: Tensor | None


def make_layer(channels: int, device: str, affine: bool = True, dtype: torch.dtype = F32) -> Layer:
    def vector(low: float, high: float) -> Tensor:
        return torch.empty(channels, dtype=torch.float64).uniform_(low, high).to(device, dtype)

    return Layer(
        vector(-1, 1),
        vector(0.5, 2),
        vector(-2, 2) if affine else None,
        vector(-1, 1) if affine else None,
    )


def run(
    function, x: Tensor, layer: Layer, training: bool, momentum: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    y = function(x, mean, var, layer.weight, layer.bias, training, momentum)
    return y, mean, var


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_matches_float64(case, training, device):
    x, layer = case.input(device), make_layer(case.sizes[1], device, case.affine)
    oracle.poison(device, x.numel(), x.numel() // 2, 3 * case.sizes[1], 2 * case.sizes[1])
    y, mean, var = run(batch_norm, x, layer, training)
    exact = oracle.batch_norm(
        x,
        layer.weight,
        layer.bias,
        running=None if training else (layer.running_mean, layer.running_var),
    )
    oracle.assert_y_keeps_contract(y, exact, layer.weight)
    assert y.dtype == x.dtype
    assert y.stride() == x.stride()
    if not training:
        assert torch.equal(mean, layer.running_mean)
        assert torch.equal(var, layer.running_var)
        return
    # torch itself fails on misaligned fp16.
    _, peer_mean, peer_var = run(F.batch_norm, x.clone(), layer, training)
    oracle.assert_no_worse(mean, 0.7 * layer.running_mean.double() + 0.3 * exact.mean, peer_mean)
    # At mean/std 1e4 the tiles' means, rounded to float32, leave 1e-5 of noise in the variance.
    factor = 2.0 if abs(case.mean) < 1e3 * case.std else 200.0
    oracle.assert_no_worse(
        var, 0.7 * layer.running_var.double() + 0.3 * exact.unbiased, peer_var, factor
    )


@pytest.mark.parametrize(
    "shape", [(3, 5, 33, 31), (8, 12, 7, 7), (5, 3, 1, 1), (2, 2, 100, 100), (2, 8, 9, 30)], ids=str
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_small_shapes_in_both_formats(shape, dtype, channels_last, device):
    x = Case(shape, "", dtype, channels_last).input(device)
    layer = make_layer(shape[1], device)
    for training in (True, False):
        y, _, _ = run(batch_norm, x, layer, training)
        exact = oracle.batch_norm(
            x,
            layer.weight,
            layer.bias,
            running=None if training else (layer.running_mean, layer.running_var),
        )
        oracle.assert_y_keeps_contract(y, exact, layer.weight)


@pytest.mark.parametrize("shape", [(8, 16, 64, 64), (16, 64, 7, 7), (2, 1, 500, 500)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_repeats_bit_for_bit(shape, channels_last, device):
    x = Case(shape, "", F32, channels_last).input(device)
    layer = make_layer(shape[1], device)
    first = run(batch_norm, x, layer, True)
    for _ in range(3):
        assert all(
            torch.equal(a, b) for a, b in zip(first, run(batch_norm, x, layer, True), strict=True)
        )


@pytest.mark.parametrize("value", [0.1, -1e4 / 3, 77777.0, 1e-30])
@pytest.mark.parametrize(
    "shape", [(4, 3, 32, 32), (3, 8, 7, 7), (37, 5), (3, 2, 33, 31), (2, 1, 300, 300)], ids=str
)
def test_constant_channels_give_the_bias(shape, value, device):
    x = torch.full(shape, value, device=device)
    layer = make_layer(shape[1], device)
    y, mean, var = run(batch_norm, x, layer, True, momentum=1.0)
    assert torch.equal(y, oracle.per_channel(layer.bias, x).expand_as(x))
    assert torch.equal(mean, x[(0, slice(None), *[0] * (x.dim() - 2))])
    assert (var == 0).all()


@pytest.mark.parametrize("outlier", [0.0, 1e6, -1e9])
@pytest.mark.parametrize("shape", [(4, 3, 32, 32), (50, 8, 7, 7), (300, 5)], ids=str)
def test_a_first_value_unlike_the_others(shape, outlier, device):
    """Padding, say. A shift taken from it would spoil the moments."""
    x = torch.randn(shape, device=device) + 1e4
    x[(0, slice(None), *[0] * (x.dim() - 2))] = outlier
    y = batch_norm(x, None, None, training=True)
    oracle.assert_y_keeps_contract(y, oracle.batch_norm(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(4, 6, 24, 24), (4, 6, 7, 7), (9, 6)], ids=str)
def test_non_finite_stays_in_its_channel(shape, bad, device):
    x = torch.randn(shape, device=device)
    layer = make_layer(6, device)
    clean, _, _ = run(batch_norm, x, layer, True)
    eval_clean, _, _ = run(batch_norm, x, layer, False)
    x[1, 2] = bad
    y, mean, var = run(batch_norm, x, layer, True)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[:, others], clean[:, others])
    assert y[:, 2].isnan().any()
    assert mean[others].isfinite().all()
    assert var[others].isfinite().all()
    assert not var[2].isfinite()
    y, _, _ = run(batch_norm, x, layer, False)
    assert torch.equal(y[[0, 2, 3]], eval_clean[[0, 2, 3]])
    assert torch.equal(y[1, others], eval_clean[1, others])


def test_known_running_statistics(device):
    """x = [1, 3]: mean 2, unbiased variance 2."""
    x = torch.tensor([[1.0], [3.0]], device=device)
    mean, var = torch.zeros(1, device=device), torch.ones(1, device=device)
    y = batch_norm(x, mean, var, training=True, momentum=1.0, eps=1e-5)
    assert mean.item() == 2.0
    assert var.item() == 2.0
    torch.testing.assert_close(y, x.sub(2) * (1 + 1e-5) ** -0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("eps", [1e-5, 1e-2, 10.0])
def test_eps_is_added_inside_the_root(eps, device):
    x = torch.randn(8, 4, 6, 6, device=device) * 0.01
    y = batch_norm(x, None, None, training=True, eps=eps)
    oracle.assert_y_keeps_contract(y, oracle.batch_norm(x, eps=eps), eps=eps)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 20, 20), (3, 4, 33, 31), (3, 8, 5, 5), (9, 4)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_variance_0_without_eps(shape, channels_last, dtype, device):
    """Infinite on either side of the running mean and NaN at it, in that channel alone."""
    x = Case(shape, "", dtype, channels_last).input(device)
    layer = make_layer(shape[1], device)
    layer.running_var[1] = 0.0
    layer.running_mean[1] = x[0, 1].flatten()[0]
    y = batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=0.0)
    exact = oracle.batch_norm(
        x, layer.weight, layer.bias, 0.0, (layer.running_mean, layer.running_var)
    ).y
    assert torch.equal(y[:, 1].double().nan_to_num(0.5), exact[:, 1].nan_to_num(0.5))
    assert y[0, 1].flatten()[0].isnan()
    others = torch.arange(shape[1], device=device) != 1
    assert y[:, others].isfinite().all()
    if device == "cuda":  # on the CPU torch multiplies out: all NaN
        # torch.nn.functional refuses such an eps. Not cuDNN, whose arithmetic is not documented.
        vectors = layer.weight, layer.bias, layer.running_mean, layer.running_var
        peer = torch.batch_norm(x.contiguous(), *vectors, False, 0.1, 0.0, False)
        assert torch.equal(y[:, 1].nan_to_num(0.5), peer[:, 1].nan_to_num(0.5))


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_parameters_in_half_precision(dtype, training, device):
    """As after `.half()` of the module."""
    x = torch.randn(4, 8, 10, 10, device=device).to(dtype)
    layer = make_layer(8, device, dtype=dtype)
    y, mean, var = run(batch_norm, x, layer, training)
    exact = oracle.batch_norm(
        x,
        layer.weight,
        layer.bias,
        running=None if training else (layer.running_mean, layer.running_var),
    )
    oracle.assert_y_keeps_contract(y, exact, layer.weight)
    if training:
        assert mean.dtype == var.dtype == dtype
        assert (
            oracle.error(mean, 0.7 * layer.running_mean.double() + 0.3 * exact.mean)
            < torch.finfo(dtype).eps
        )
        assert (
            oracle.error(var, 0.7 * layer.running_var.double() + 0.3 * exact.unbiased)
            < torch.finfo(dtype).eps
        )


LAYOUTS = {
    "sliced": lambda x: x[:, 2:10, 1:7, ::2],
    "transposed in space": lambda x: x.mT,
    "permuted": lambda x: x.permute(1, 0, 3, 2),
    "expanded": lambda x: x[:, :1].expand(-1, 8, -1, -1),
    "channels last, sliced": lambda x: x.to(memory_format=torch.channels_last)[:, 2:10],
    "channels last, cropped": lambda x: x.to(memory_format=torch.channels_last)[:, :, 1:6, 2:9],
    "every other sample": lambda x: x[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_layouts(layout, training, device):
    x = LAYOUTS[layout](torch.randn(6, 12, 8, 10, device=device))
    layer = make_layer(x.size(1), device)
    y, _, _ = run(batch_norm, x, layer, training)
    exact = oracle.batch_norm(
        x,
        layer.weight,
        layer.bias,
        running=None if training else (layer.running_mean, layer.running_var),
    )
    oracle.assert_y_keeps_contract(y, exact, layer.weight)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 20), min_size=2, max_size=5).filter(
        lambda s: s[0] * torch.Size(s[2:]).numel() > 1
    ),
    dtype=st.sampled_from([F32, F16, BF16]),
    channels_last=st.booleans(),
    offset=st.integers(0, 3),
    mean=st.sampled_from([0.0, -3.0, 1000.0]),
    training=st.booleans(),
    affine=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(device, shape, dtype, channels_last, offset, mean, training, affine, seed):
    torch.manual_seed(seed)
    x = Case(tuple(shape), "", dtype, channels_last, offset=offset, mean=mean, std=1.0).input(
        device
    )
    layer = make_layer(shape[1], device, affine)
    y, _, _ = run(batch_norm, x, layer, training)
    exact = oracle.batch_norm(
        x,
        layer.weight,
        layer.bias,
        running=None if training else (layer.running_mean, layer.running_var),
    )
    oracle.assert_y_keeps_contract(y, exact, layer.weight)
    like = F.batch_norm(x.cpu().float(), *(torch.ones(shape[1]) for _ in range(2)))
    assert all(
        ours == theirs
        for size, ours, theirs in zip(shape, y.stride(), like.stride(), strict=True)
        if size > 1
    )
