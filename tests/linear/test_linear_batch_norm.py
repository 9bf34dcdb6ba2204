"""functional.linear_batch_norm on CPU and CUDA: values, statistics, numerics, layouts, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_cases import (
    ACTIVATIONS,
    BF16,
    CASES,
    FP16,
    TRAINING,
    Case,
    Layer,
    assert_no_worse,
    fp32_precision,
    fused,
    make_layer,
    max_error,
    oracle,
    unfused,
)

from cutlass_bn import functional


@TRAINING
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case, training, device):
    layer = make_layer(case, device)
    peer = layer.clone()
    with fp32_precision(case.tf32):
        y, expected_y = fused(layer, training), unfused(peer, training)
    exact, exact_layer = oracle(make_layer(case, device), training)
    assert y.dtype == expected_y.dtype
    assert y.is_contiguous()
    # The tensor core's TF32 inputs may be truncated where cuBLAS rounds: up to twice the error of
    # an input.
    assert_no_worse(y, expected_y, exact, factor=3.0 if case.tf32 else 2.0, what="y")
    for name in ("running_mean", "running_var"):
        ours, theirs, expected = (getattr(of, name) for of in (layer, peer, exact_layer))
        assert_no_worse(ours, theirs, expected, factor=3.0 if case.tf32 else 2.0, what=name)
    assert layer.num_batches_tracked == int(training)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_repeats_bit_for_bit(dtype, device):
    layer = make_layer(Case(333, 264, 64, "tails", dtype), device)
    first, second = layer.clone(), layer.clone()
    assert torch.equal(fused(first, True), fused(second, True))
    assert torch.equal(first.running_mean, second.running_mean)
    assert torch.equal(first.running_var, second.running_var)


@TRAINING
@pytest.mark.parametrize(("n", "k"), [(136, 64), (35, 25)], ids=["aligned", "odd"])
def test_reads_nothing_but_its_inputs(n, k, training, device):
    """Operands are windows into NaN, and so is the memory of outputs and workspace."""
    case = Case(70, n, k, "tails")
    layer = make_layer(case, device)
    expected = fused(layer.clone(), training)
    for _ in range(4):
        torch.full((1 << 20,), torch.nan, device=device)
    torch.full((case.m, n), torch.nan, device=device)

    def window(t):
        if t.dim() == 0:
            return t
        around = torch.full([size + 8 for size in t.shape], torch.nan, device=device, dtype=t.dtype)
        view = around[tuple(slice(4, 4 + size) for size in t.shape)]
        return view.copy_(t)

    assert max_error(fused(layer.map(window), training), expected) < 1e-5


LAYOUTS = {
    "transposed input": lambda layer: replace(layer, input=layer.input.t().contiguous().t()),
    "transposed weight": lambda layer: replace(layer, weight=layer.weight.t().contiguous().t()),
    "padded rows": lambda layer: replace(
        layer,
        input=torch.nn.functional.pad(layer.input, (0, 8))[:, :-8],
        weight=torch.nn.functional.pad(layer.weight, (0, 8))[:, :-8],
    ),
    "misaligned rows": lambda layer: replace(
        layer, input=torch.nn.functional.pad(layer.input, (1, 2))[:, 1:-2]
    ),
    "misaligned offset": lambda layer: replace(
        layer,
        weight=torch.nn.functional.pad(layer.weight.flatten(), (1, 0))[1:].view_as(layer.weight),
    ),
    "every other row": lambda layer: replace(layer, input=layer.input.repeat_interleave(2, 0)[::2]),
    "expanded parameters": lambda layer: replace(
        layer,
        gamma=layer.gamma[:1].expand_as(layer.gamma),
        scale=layer.scale[:1].expand_as(layer.scale),
    ),
    "strided running statistics": lambda layer: replace(
        layer,
        running_mean=layer.running_mean.repeat_interleave(2)[::2],
        running_var=layer.running_var.repeat_interleave(2)[::2],
    ),
}


def test_ieee_fp32_is_of_no_effect_where_nothing_is_split(device):
    layer = make_layer(Case(33, 12, 8, "little work"), device)
    assert torch.equal(fused(layer.clone(), True, ieee_fp32=True), fused(layer, True))


@TRAINING
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, training, device):
    layer = LAYOUTS[layout](
        make_layer(Case(96, 72, 40, "aligned before the layout changes it"), device)
    )
    dense = layer.map(lambda t: t.clone(memory_format=torch.contiguous_format))
    y = fused(layer, training)
    exact, exact_layer = oracle(dense, training)
    assert max_error(y, exact) < 3e-6
    assert max_error(layer.running_mean, exact_layer.running_mean) < 1e-6
    assert max_error(layer.running_var, exact_layer.running_var) < 1e-6


def test_rows_that_are_all_the_same(device):
    """An expanded input (stride 0): channels are constant, so y is beta exactly, the variance 0."""
    layer = make_layer(Case(64, 24, 16, "constant channels", scale=False), device)
    layer = replace(layer, input=layer.input[:1].expand(64, 16))
    y = fused(layer, True, momentum=1.0)
    assert torch.equal(y, layer.beta.expand_as(y))
    assert torch.equal(layer.running_var, torch.zeros_like(layer.running_var))


@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_large_mean(mean, device):
    """Products that are exact in float32, so that only the batch norm can lose digits."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randint(-512, 512, (257, 1), generator=generator) / 256 + mean).to(device)
    layer = Layer(x, torch.ones(8, 1, device=device), None, None, None, None, None, None)
    exact, _ = oracle(layer, True)
    std = x.double().std(correction=0).item()
    assert (fused(layer, True).double() - exact).abs().max() <= 2**-23 * mean / std + 1e-5


def test_large_bias_does_not_hurt(device):
    layer = make_layer(Case(100, 16, 8, "bias"), device)
    small = fused(layer.clone(), True)
    layer.bias += 1e6
    assert torch.equal(fused(layer, True), small)


def test_known_running_statistics(device):
    """x = [1, 3], momentum 1: mean 2, unbiased variance 2; bias only moves the mean, scale both."""
    ones = torch.ones(1, device=device)
    layer = Layer(
        torch.tensor([[1.0], [3.0]], device=device),
        ones[:, None],
        3 * ones,
        2 * ones,
        0 * ones,
        ones.clone(),
        None,
        None,
    )
    fused(layer, True, momentum=1.0)
    assert layer.running_mean.item() == 10.0
    assert layer.running_var.item() == 8.0


def test_cumulative_average(device):
    layer = make_layer(Case(50, 12, 8, "momentum None"), device)
    exact = layer.double()
    for step in range(1, 4):
        batch = make_layer(Case(50, 12, 8, "another batch"), device, seed=step)
        layer, exact = replace(layer, input=batch.input), replace(exact, input=batch.input.double())
        fused(layer, True, momentum=None)
        unfused(exact, True, momentum=1 / step)
    assert layer.num_batches_tracked == 3
    assert max_error(layer.running_mean, exact.running_mean) < 1e-6
    assert max_error(layer.running_var, exact.running_var) < 1e-6


def test_cumulative_average_without_a_counter(device):
    layer = make_layer(Case(50, 12, 8, "as torch.nn.BatchNorm1d: nothing to average over"), device)
    before = layer.clone()
    fused(replace(layer, num_batches_tracked=None), True, momentum=None)
    assert torch.equal(layer.running_mean, before.running_mean)


@TRAINING
def test_without_running_statistics(training, device):
    layer = make_layer(Case(40, 16, 8, "the batch's own statistics in both modes"), device)
    exact, _ = oracle(layer, True)
    bare = replace(layer, running_mean=None, running_var=None)
    assert max_error(fused(bare, training), exact) < 3e-6
    assert layer.num_batches_tracked == int(training)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_weight_stays_in_its_channel(bad, device):
    layer = make_layer(Case(80, 64, 32, "one bad channel", activation="relu"), device)
    layer.weight[5, 3] = bad
    for training in (True, False):
        y = fused(layer.clone(), training)
        good = torch.arange(64, device=device) != 5
        assert torch.isfinite(y[:, good]).all()
        assert not (training and torch.isfinite(y[:, 5]).any())


def test_non_finite_row_stays_in_its_row_in_eval(device):
    layer = make_layer(Case(80, 64, 32, "one bad row"), device)
    layer.input[7] = torch.nan
    y = fused(layer, False)
    assert y[7].isnan().all()
    assert torch.isfinite(y[torch.arange(80, device=device) != 7]).all()


def test_half_sums_do_not_overflow(device):
    """The sum of a column is far above 65504, its mean is not."""
    layer = make_layer(Case(4096, 8, 8, "fp16 sums", FP16, bias=False, scale=False), device)
    layer.input.fill_(16.0)[::2] = 15.0
    layer.weight.fill_(1.0)
    y = fused(layer, True, momentum=1.0)
    assert torch.isfinite(y).all()
    exact, exact_layer = oracle(layer, True, momentum=1.0)
    assert max_error(y, exact) < 2e-3
    assert max_error(layer.running_mean, exact_layer.running_mean) < 1e-6


@pytest.mark.parametrize("empty", ["m", "n", "k"])
@TRAINING
def test_empty(empty, training, device):
    case = replace(Case(6, 8, 8, "no elements"), **{empty: 0})
    layer = (
        make_layer(case, device).requires_grad()
        if empty != "k"
        else make_layer(replace(case, k=1), device)
    )
    if empty == "k":
        layer = (
            replace(layer, input=layer.input[:, :0], weight=layer.weight[:, :0])
            .clone()
            .requires_grad()
        )
    before = layer.clone()
    y = fused(layer, training)
    assert y.shape == (case.m, case.n)
    assert layer.num_batches_tracked == int(training)
    if empty != "k":
        assert torch.equal(layer.running_mean, before.running_mean)
    elif training:
        assert torch.equal(y, layer.beta.expand_as(y))
    y.sum().backward()
    for name, tensor in layer.differentiable().items():
        assert tensor.grad is not None, name
        assert torch.isfinite(tensor.grad).all(), name


@pytest.mark.parametrize(("m", "n"), [(70_001, 8), (3, 70_001)], ids=["rows", "columns"])
@TRAINING
def test_beyond_grid_limits(m, n, training, device):
    layer = make_layer(Case(m, n, 8, "more than 65535 of them"), device)
    exact, exact_layer = oracle(layer, training)
    assert max_error(fused(layer, training), exact) < 2e-5
    assert max_error(layer.running_var, exact_layer.running_var) < 1e-5


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("k", [8, 9], ids=["fused", "portable"])
def test_more_than_2_to_the_31_elements(k):
    m, n = (1 << 19) + 3, 4104
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    weight = torch.randn(n, k, device="cuda", dtype=BF16)
    y = functional.linear_batch_norm(x, weight, training=True)
    rows = torch.tensor([0, 1, m // 2, m - 2, m - 1], device="cuda")
    u = x.double() @ weight.double().t()[:, :16]
    expected = torch.nn.functional.batch_norm(u, None, None, training=True)[rows]
    assert max_error(y[rows, :16], expected) < 2e-2
    last = torch.nn.functional.batch_norm(
        x.double() @ weight.double().t()[:, -16:], None, None, training=True
    )[rows]
    assert max_error(y[rows, -16:], last) < 2e-2


ERRORS = {
    "1-D input": (lambda a: a | {"input": a["input"][0]}, ValueError, "expected 2D input"),
    "3-D input": (lambda a: a | {"input": a["input"][None]}, ValueError, "expected 2D input"),
    "one row": (
        lambda a: a | {"input": a["input"][:1]},
        ValueError,
        "Expected more than 1 value per channel",
    ),
    "activation": (lambda a: a | {"activation": "tanh"}, ValueError, "activation: expected"),
    "inner sizes": (
        lambda a: a | {"weight": a["weight"][:, :-1]},
        RuntimeError,
        "weight: expected shape",
    ),
    "weight's dtype": (
        lambda a: a | {"weight": a["weight"].half()},
        RuntimeError,
        "weight: expected",
    ),
    "bias's dtype": (lambda a: a | {"bias": a["bias"].half()}, RuntimeError, "bias: expected"),
    "scale's shape": (
        lambda a: a | {"scale": a["scale"][:1]},
        RuntimeError,
        "scale: expected shape",
    ),
    "gamma's shape": (
        lambda a: a | {"gamma": a["gamma"][None]},
        RuntimeError,
        "gamma: expected shape",
    ),
    "running statistics' shape": (
        lambda a: a | {"running_var": a["running_var"][:-1]},
        RuntimeError,
        "running_var: exp",
    ),
    "half of the running statistics": (
        lambda a: a | {"running_var": None},
        RuntimeError,
        "both or neither",
    ),
}


@pytest.mark.parametrize("mistake", ERRORS)
def test_errors_change_nothing(mistake, device):
    layer = make_layer(Case(6, 8, 8, "valid before the mistake"), device)
    before = layer.clone()
    change, error, text = ERRORS[mistake]
    with pytest.raises(error, match=text):
        functional.linear_batch_norm(**change(layer.arguments()), training=True)
    assert torch.equal(layer.running_mean, before.running_mean)
    assert torch.equal(layer.running_var, before.running_var)
    assert layer.num_batches_tracked == 0


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    m=st.integers(16, 300),
    n=st.integers(1, 300),
    k=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, BF16, FP16]),
    options=st.tuples(*[st.booleans()] * 5),
    activation=st.sampled_from(list(ACTIVATIONS)),
    seed=st.integers(0, 1000),
)
def test_any_shape(device, m, n, k, dtype, options, activation, seed):
    bias, scale, affine, tf32, training = options
    case = Case(m, n, k, "drawn", dtype, bias, scale, affine, activation, tf32=tf32)
    layer = make_layer(case, device, seed)
    peer = layer.clone()
    exact, _ = oracle(layer, training)
    with fp32_precision(tf32):
        y = fused(layer, training)
        assert_no_worse(y, unfused(peer, training), exact, factor=4.0, floor=1e-5)
