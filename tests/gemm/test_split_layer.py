"""The layer on split fp32 products: fp32 at PyTorch's default precision on a Hopper GPU."""

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
from split_cases import left_to_exact_kernel
from torch import Tensor

from cutlass_bn import explain
from cutlass_bn.functional import linear_batch_norm
from cutlass_bn.ops import linear_batch_norm as ops
from cutlass_bn.ops.product import FP32_PRODUCTS

pytestmark = [pytest.mark.gpu, hopper]

# Sizes near the smallest that are split, by the rules of csrc/linear_bn/policy.cpp.
LARGE = Case(1024, 1152, 256, "large tiles")
SMALL = Case(512, 1024, 520, "small tiles", activation="silu")
LARGE_TAILS = Case(
    1025, 900, 293, "large tiles, something left over everywhere, odd K", activation="gelu"
)
SMALL_TAILS = Case(
    641,
    820,
    517,
    "small tiles, something left over everywhere, odd K",
    scale=False,
    activation="relu",
)
CASES = {
    LARGE: "large",
    LARGE_TAILS: "large",
    Case(70_001, 136, 1000, "an input that is split in two parts", bias=False): "large",
    SMALL: "small",
    SMALL_TAILS: "small",
    Case(720, 732, 511, "no parameters", bias=False, scale=False, affine=False): "small",
}


def sm_count() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def plan(layer: Layer, training: bool, **options):
    return explain(linear_batch_norm, **layer.arguments(), training=training, **options)


@TRAINING
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.why.replace(" ", "-"))
def test_matches_float64_as_well_as_pytorch(case, training):
    layer = make_layer(case, "cuda")
    peer, again = layer.clone(), layer.clone()
    chosen = plan(layer, training)
    assert chosen.path == "fused", chosen
    if sm_count() == 132:
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
@pytest.mark.parametrize(
    "case",
    [
        LARGE,
        LARGE_TAILS,
        SMALL,
        Case(1100, 520, 1030, "split products in the backward too, with tails"),
    ],
    ids=str,
)
def test_gradients(case, training):
    layer = make_layer(case, "cuda")
    assert plan(layer, training).path == "fused"
    dy = torch.randn(case.m, case.n, device="cuda")
    exact, peer, ours = (
        gradients(function, of, training, dy)
        for function, of in (
            (unfused, layer.double()),
            (unfused, layer.clone()),
            (fused, layer.clone()),
        )
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
    nothing = (None,) * 7
    how = (0.1, 1e-5, 0, torch.float32, FP32_PRODUCTS["ieee"])
    y, u, _ = ops.training(x, w, *nothing, *how)
    assert torch.equal(u, sgemm)
    assert torch.equal(linear_batch_norm(x, w, training=True, ieee_fp32=True), y)
    split = product(x, w)
    assert not torch.equal(split, sgemm)
    assert_no_worse(split, sgemm, exact, factor=1.0, floor=0.0)
    with fp32_precision(tf32=True):
        tf32 = product(x, w)
        assert torch.equal(product(x, w, ieee_fp32=True), tf32)
    assert max_error(tf32, exact) > 2e-5


SPLIT_OR_NOT = {
    (2048, 2048, 64): "split large",
    (2112, 2048, 63): "",  # a K below 64
    (8192, 68, 1024): "split small",
    (8192, 64, 1024): "",  # a dimension of no more than 64
    (512, 1024, 512): "split small",
    (512, 1024, 511): "",  # less than 2^28 products
    (1024, 512, 1024): "split small",
    (1020, 512, 1024): "",  # less than 2^19 outputs
    (16384, 68, 488): "split large",
    (16384, 68, 480): "",  # less than 2^15 products for each row that has to be split
    (1024, 1152, 512): "split large",
    (1024, 1152, 513): "split small",  # few large tiles, and cuBLAS splits such a K
    (1536, 2816, 513): "split small",
    (1664, 2688, 513): "split large",
    (2688, 2816, 4096): "split large",
    (2688, 2816, 4097): "split small",
    (2816, 2816, 4097): "split large",
}


@pytest.mark.parametrize("sizes", SPLIT_OR_NOT, ids=str)
def test_what_is_split_into_which_tiles(sizes):
    """On either side of each threshold."""
    if sm_count() != 132:
        pytest.skip("the sizes are for 132 multiprocessors")
    m, n, k = sizes
    x, w = torch.empty(m, k, device="cuda"), torch.empty(n, k, device="cuda")
    chosen = explain(linear_batch_norm, x, w, training=True)
    assert chosen.path == ("fused" if SPLIT_OR_NOT[sizes] else "portable"), chosen
    assert chosen.tile.startswith(SPLIT_OR_NOT[sizes]), chosen


@TRAINING
def test_explain(training):
    large, small = (
        make_layer(LARGE, "cuda"),
        make_layer(Case(64, 128, 64, "hardly any work"), "cuda"),
    )
    path, tile, reason = plan(large, training)
    assert (path, reason) == ("fused", "")
    assert tile == "split large 128x128 tile"
    assert plan(large, training, ieee_fp32=True) == (
        "portable",
        "",
        "IEEE float32 products were asked for",
    )
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
    layer = make_layer(Case(725, 727, 513, "odd everywhere"), "cuda")
    peer = layer.clone()
    assert plan(layer, True).path == "fused"
    exact, _ = oracle(layer, True)
    assert_no_worse(fused(layer, True), unfused(peer, True), exact, factor=1.0, floor=3e-7)


def test_equal_rows_give_beta():
    """Values that no format holds exactly: a constant channel is beta, its variance 0."""
    layer = make_layer(LARGE, "cuda")
    layer = replace(layer, input=layer.input[:1].repeat(LARGE.m - 31, 1))
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


def is_left_to_exact_kernel(layer: Layer) -> Tensor:
    """Bool [M, N]."""
    return left_to_exact_kernel(layer.input, layer.weight)


@TRAINING
def test_rows_that_the_planes_cannot_hold(training):
    """Plain sums stand in for them where that matters; their neighbours are as they should be."""
    layer = make_layer(LARGE, "cuda")
    layer.input[100:110] *= torch.exp2(-60 * torch.rand(10, LARGE.k, device="cuda"))
    layer.input[1000, 5] = 1e-12
    # The large elements of the weight meet large ones.
    assert not is_left_to_exact_kernel(layer).any()
    # The planes hold the other elements of these rows to 2^-11, and the results in these columns
    # are made of those.
    rows, columns = slice(200, 203), slice(5, 25)
    layer.input[rows, 0] = 2.0**40
    layer.weight[columns, 0] = 0.0
    other_rows = torch.ones(LARGE.m, dtype=torch.bool, device="cuda")
    other_rows[rows] = False
    left = is_left_to_exact_kernel(layer)
    assert left[rows, columns].all()
    assert not left[other_rows].any()
    assert plan(layer, training).path == "fused"
    ours, theirs = fused(layer.clone(), training), unfused(layer.clone(), training)
    exact, _ = oracle(layer, training)
    # In other columns these rows dwarf everything else, and in training decide on the variance by
    # themselves.
    for part in ((slice(None), columns), other_rows, *([] if training else [rows])):
        assert_no_worse(ours[part], theirs[part], exact[part], floor=3e-7)


@TRAINING
def test_reads_nothing_but_its_inputs(training):
    """Outputs and workspace lie in memory full of NaN."""
    layer = make_layer(SMALL_TAILS, "cuda")
    assert plan(layer, training).path == "fused"
    expected = fused(layer.clone(), training)
    poison = [
        torch.full((1 << size,), torch.nan, device="cuda")
        for size in range(8, 23)
        for _ in range(3)
    ]
    del poison
    assert torch.equal(fused(layer, training), expected)
