"""Every tile shape of the Hopper GEMM, with rows and columns left over, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from linear_cases import (
    BF16,
    FP16,
    TRAINING,
    Case,
    assert_no_worse,
    fp32_precision,
    fused,
    hopper,
    make_layer,
    oracle,
    unfused,
)

from cutlass_bn import explain
from cutlass_bn.functional import linear_batch_norm

pytestmark = [pytest.mark.gpu, hopper]

# Sizes for which the dispatcher chooses this tile where there are 132 multiprocessors.
SIZES = {"large": (1985, 1000), "medium": (1000, 1000), "small": (70, 136)}
DTYPES = {
    "tf32": {"dtype": torch.float32, "tf32": True, "scale": True},
    "bf16": {"dtype": BF16, "scale": False},
    "bf16 to fp32": {"dtype": BF16, "scale": True},
    "fp16": {"dtype": FP16, "scale": False},
    "fp16 to fp32": {"dtype": FP16, "scale": True},
}


def check(m: int, n: int, k: int, training: bool, tile: str = "", **options) -> None:
    case = Case(m, n, k, "tails", **options)
    layer = make_layer(case, "cuda")
    peer = layer.clone()
    with fp32_precision(case.tf32):
        plan = explain(linear_batch_norm, **layer.arguments(), training=training)
        y, expected = fused(layer, training), unfused(peer, training)
        again = fused(peer.clone() if not training else replace(make_layer(case, "cuda")), training)
    assert plan.path == "fused", plan
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert plan.tile.startswith(tile), plan
    assert torch.equal(y, again)
    exact, exact_layer = oracle(make_layer(case, "cuda"), training)
    assert_no_worse(y, expected, exact, factor=3.0, what="y")
    # Of two rows the variance is one difference, and carries the rounding of both to the stored
    # type by chance.
    floor = 2.0**-8 if m == 2 and case.dtype != torch.float32 else 1e-6
    for name in ("running_mean", "running_var"):
        ours, theirs, wanted = (getattr(of, name) for of in (layer, peer, exact_layer))
        assert_no_worse(ours, theirs, wanted, factor=3.0, floor=floor, what=name)


@TRAINING
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", SIZES)
def test_tile(tile, dtype, training):
    check(*SIZES[tile], 72, training, tile, activation="silu", **DTYPES[dtype])


@pytest.mark.parametrize("tile", SIZES)
@pytest.mark.parametrize("n_odd", [3, 1])
def test_columns_that_are_no_multiple_of_16_bytes(tile, n_odd):
    """In training u has padded rows: the GEMM clips its last vectors."""
    m, n = SIZES[tile]
    check(m, n + n_odd, 72, True, tile, dtype=BF16, scale=False)


@pytest.mark.parametrize("k", [8, 64, 4096])
@pytest.mark.parametrize("m", [1, 2, 63, 64, 65, 127, 128, 129])
def test_rows_around_a_tile(m, k):
    for training in (True, False) if m > 1 else (False,):
        check(m, 136, k, training, dtype=BF16, scale=False)
