"""The Linear + BatchNorm1d layer on split fp32 products: fp32 at PyTorch's default precision on a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_cases import (
    TRAINING,
    Case,
    Layer,
    assert_no_worse,
    fp32_precision,
    fused,
    gradients,
    hopper,
    make_layer,
    max_error,
    oracle,
    unfused,
)
from torch import Tensor

from cutlass_bn import explain
from cutlass_bn.functional import linear_batch_norm
from cutlass_bn.ops import linear_batch_norm as ops

pytestmark = [pytest.mark.gpu, hopper]

LARGE = Case(4096, 2048, 1024, "large tiles")
SMALL = Case(320, 640, 2048, "small tiles", activation="relu")
CASES = {
    LARGE: "large",
    Case(4001, 1992, 1001, "large tiles, something left over everywhere, odd K", activation="gelu"): "large",
    Case(70_001, 1024, 1000, "an input that is split in two parts", bias=False): "large",
    SMALL: "small",
    Case(333, 520, 4095, "small tiles, something left over everywhere, odd K", scale=False, activation="silu"): "small",
    Case(512, 512, 1024, "no parameters", bias=False, scale=False, affine=False): "small",
}


def plan(layer: Layer, training: bool, **options):
    return explain(linear_batch_norm, **layer.arguments(), training=training, **options)


@TRAINING
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why.replace(" ", "-"))
def test_matches_float64_as_well_as_pytorch(case, training):
    layer = make_layer(case, "cuda")
    peer, again = layer.clone(), layer.clone()
    chosen = plan(layer, training)
    assert chosen.path == "fused", chosen
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert chosen.tile.startswith(f"split {CASES[case]}"), chosen
    y, expected = fused(layer, training), unfused(peer, training)
    exact, exact_layer = oracle(again, training)
    assert y.is_contiguous()
    # Besides the products: the roundings of the normalisation and of y.
    assert_no_worse(y, expected, exact, factor=1.0, floor=3e-7, what="y")
    for name in ("running_mean", "running_var"):
        ours, theirs, wanted = (getattr(of, name) for of in (layer, peer, exact_layer))
        assert_no_worse(ours, theirs, wanted, factor=1.0, floor=3e-7, what=name)
    assert layer.num_batches_tracked == int(training)
    assert torch.equal(fused(again, training), y)
    assert torch.equal(again.running_mean, layer.running_mean)
    assert torch.equal(again.running_var, layer.running_var)


@TRAINING
@pytest.mark.parametrize("case", [SMALL, Case(1100, 520, 1030, "split products in the backward too")], ids=str)
def test_gradients(case, training):
    layer = make_layer(case, "cuda")
    dy = torch.randn(case.m, case.n, device="cuda")
    exact, peer, ours = (
        gradients(function, of, training, dy)
        for function, of in ((unfused, layer.double()), (unfused, layer.clone()), (fused, layer.clone()))
    )
    for name, gradient in ours.items():
        if not (training and name in ("bias", "scale")):  # what is left after cancellation
            assert_no_worse(gradient, peer[name], exact[name], floor=3e-7, what=name)
    for name, gradient in gradients(fused, layer.clone(), training, dy).items():
        assert torch.equal(gradient, ours[name]), name


def product(x: Tensor, w: Tensor, **options) -> Tensor:
    """x w^T by way of the layer: in eval, with a normalisation that changes nothing."""
    mean, var = torch.zeros(len(w), device="cuda"), torch.ones(len(w), device="cuda")
    return linear_batch_norm(x, w, None, None, mean, var, eps=0.0, **options)


def test_the_switch():
    """PyTorch's chooses between full precision and TF32; ieee_fp32 what full precision is."""
    layer = make_layer(SMALL, "cuda")
    x, w = layer.input, layer.weight
    sgemm, exact = torch.mm(x, w.t()), x.double() @ w.double().t()
    assert torch.equal(product(x, w, ieee_fp32=True), sgemm)
    u, stats = ops.stats(x, w, None, None, None, None, None, 0.1, 1e-5, ops.FP32_PRODUCTS["ieee"])
    assert torch.equal(u, sgemm)
    y = ops.transform(x, w, None, None, None, None, u, stats, 1e-5, 0, torch.float32, ops.FP32_PRODUCTS["ieee"])
    assert torch.equal(linear_batch_norm(x, w, training=True, ieee_fp32=True), y)
    split = product(x, w)
    assert not torch.equal(split, sgemm)
    assert_no_worse(split, sgemm, exact, factor=1.0, floor=0.0)
    with fp32_precision(tf32=True):
        tf32 = product(x, w)
        assert torch.equal(product(x, w, ieee_fp32=True), tf32)
    assert max_error(tf32, exact) > 2e-5


@TRAINING
def test_explain(training):
    large, small = make_layer(LARGE, "cuda"), make_layer(Case(64, 128, 64, "hardly any work"), "cuda")
    path, tile, reason = plan(large, training)
    assert (path, reason) == ("fused", "")
    assert tile == "split large 128x128 tile"
    assert plan(large, training, ieee_fp32=True) == ("portable", "", "IEEE float32 products were asked for")
    path, tile, reason = plan(small, training)
    assert (path, tile) == ("portable", "")
    assert reason.startswith("SGEMM is faster")
    with fp32_precision(tf32=True):
        for options in ({}, {"ieee_fp32": True}):
            assert plan(large, training, **options) == ("fused", "large 128x128 tile", "")


LAYOUTS = {
    "input in columns": lambda layer: replace(layer, input=layer.input.t().contiguous().t()),
    "weight in columns": lambda layer: replace(layer, weight=layer.weight.t().contiguous().t()),
    "windows at odd addresses": lambda layer: replace(
        layer,
        input=torch.nn.functional.pad(layer.input, (1, 2), value=torch.nan)[:, 1:-2],
        weight=torch.nn.functional.pad(layer.weight, (3, 4), value=torch.nan)[:, 3:-4],
    ),
}


@TRAINING
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_split_alike(layout, training):
    dense = make_layer(SMALL, "cuda")
    layer = LAYOUTS[layout](dense.clone())
    assert plan(layer, training).path == "fused"
    assert torch.equal(fused(layer, training), fused(dense, training))


def test_odd_rows_of_the_output():
    """In training u has padded rows."""
    layer = make_layer(Case(1000, 1001, 1001, "odd everywhere"), "cuda")
    peer = layer.clone()
    assert plan(layer, True).path == "fused"
    exact, _ = oracle(layer, True)
    assert_no_worse(fused(layer, True), unfused(peer, True), exact, factor=1.0, floor=3e-7)


def test_equal_rows_give_beta():
    """Values that no format holds exactly: a constant channel is beta, its variance 0."""
    layer = make_layer(LARGE, "cuda")
    layer = replace(layer, input=layer.input[:1].repeat(LARGE.m - 95, 1))
    assert plan(layer, True).path == "fused"
    y = fused(layer, True, momentum=1.0)
    assert torch.equal(y, layer.beta.expand_as(y))
    assert not layer.running_var.any()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_stay_where_they_are(bad):
    """In their channel in training; in their row in eval."""
    clean = make_layer(LARGE, "cuda")
    expected = fused(clean.clone(), True), fused(clean.clone(), False)
    layer = clean.clone()
    layer.weight[5, 3] = bad
    y = fused(layer, True)
    others = torch.arange(LARGE.n, device="cuda") != 5
    assert not y[:, 5].isfinite().any()
    assert max_error(y[:, others], expected[0][:, others]) < 3e-6
    assert not layer.running_var[5].isfinite()
    assert layer.running_var[others].isfinite().all()
    layer = clean.clone()
    layer.input[7, 3] = bad
    y = fused(layer, False)
    others = torch.arange(LARGE.m, device="cuda") != 7
    assert not y[7].isfinite().any()
    assert max_error(y[others], expected[1][others]) < 3e-6


@TRAINING
def test_rows_that_the_planes_cannot_hold(training):
    """Plain sums stand in for them, and their neighbours are as they should be."""
    layer = make_layer(LARGE, "cuda")
    layer.input[100:110] *= torch.exp2(-60 * torch.rand(10, LARGE.k, device="cuda"))
    layer.input[4000, 5] = 1e-12
    exact, _ = oracle(layer, training)
    assert_no_worse(fused(layer.clone(), training), unfused(layer.clone(), training), exact, floor=3e-7)


@TRAINING
def test_reads_nothing_but_its_inputs(training):
    """Outputs and workspace lie in memory full of NaN."""
    case = Case(333, 520, 1001, "something left over everywhere")
    layer = make_layer(case, "cuda")
    expected = fused(layer.clone(), training)
    poison = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(8, 23) for _ in range(3)]
    del poison
    assert torch.equal(fused(layer, training), expected)
