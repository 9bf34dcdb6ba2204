"""The kernels behind the layer's backward, from y to u = x W^T.

A weight that is the identity makes the gradient of input that of u, whatever the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import oracle
import pytest
import torch
import torch.nn.functional as F
from linear_cases import ACTIVATIONS, BF16, EPS, FP16, Case, assert_no_worse, make_layer, max_error
from torch import Tensor

from cutlass_bn._activations import CODES
from cutlass_bn.ops import linear_batch_norm as ops
from cutlass_bn.ops.product import FP32_PRODUCTS

pytestmark = pytest.mark.gpu

F32 = torch.float32

NAMES = ("u", "scale", "gamma", "beta")


@dataclass
class Columns:
    """u [M, N] and what follows it."""

    u: Tensor
    scale: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    activation: str | None

    def stats(self) -> Tensor:
        wide = self.u.double()
        var, mean = torch.var_mean(wide, 0, correction=0)
        scale = 1.0 if self.scale is None else self.scale.double()
        return torch.stack(
            [mean.float(), (mean - mean.float()).float(), (scale**2 * var + EPS).rsqrt().float()]
        )

    def ours(
        self, grad: Tensor, wanted: str = "usgb", x: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Of what is wanted, by first letters. x: u's gradient comes as weight's, du^T x."""
        vectors = {"scale": self.scale, "gamma": self.gamma, "beta": self.beta}
        dtypes = [
            None if name[0] not in wanted else F32 if t is None else t.dtype
            for name, t in vectors.items()
        ]
        n, of_u = self.u.size(1), "u" in wanted
        identity = torch.eye(n, dtype=self.u.dtype, device="cuda")
        code, how = CODES[self.activation], FP32_PRODUCTS["ieee"]
        du, dw, dbias, *found = ops.backward(
            grad, self.u if x is None else x, identity, self.u, self.stats(), *vectors.values(),
            EPS, code, how, of_u and x is None, of_u and x is not None, None, *dtypes,
        )  # fmt: skip
        assert dbias.numel() == 0
        assert (du if x is not None else dw).numel() == 0
        found = dict(zip(NAMES, (du if x is None else dw, *found), strict=True))
        assert all(t.numel() == 0 for name, t in found.items() if name[0] not in wanted)
        return {name: t for name, t in found.items() if name[0] in wanted}

    def by_torch(self, grad: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """PyTorch's own operations, all in `dtype` or each in the dtype that it is given."""
        leaves = {
            name: t.detach().to(dtype or t.dtype).requires_grad_()
            for name, t in zip(NAMES, (self.u, self.scale, self.gamma, self.beta), strict=True)
            if t is not None
        }
        z = leaves["u"] * leaves["scale"] if "scale" in leaves else leaves["u"]
        y = F.batch_norm(z, None, None, leaves.get("gamma"), leaves.get("beta"), True, 0.0, EPS)
        y = ACTIVATIONS[self.activation](y)
        return dict(
            zip(
                leaves, torch.autograd.grad(y, list(leaves.values()), grad.to(y.dtype)), strict=True
            )
        )


def make(
    m: int,
    n: int,
    dtype: torch.dtype = F32,
    activation: str | None = None,
    vectors: bool = True,
    mean: float = 0.5,
    std: float = 1.5,
    parameters: torch.dtype = F32,
) -> Columns:
    layer = make_layer(Case(m, n, 1, "", parameter_dtype=parameters), "cuda")
    width = 16 // dtype.itemsize
    u = torch.empty_strided((m, n), (-(-n // width) * width, 1), dtype=dtype, device="cuda")
    u.copy_(torch.randn(m, n, device="cuda") * std + mean)
    found = (layer.scale, layer.gamma, layer.beta) if vectors else (None, None, None)
    return Columns(u, *found, activation)


def gradient_like(u: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(u.shape, device="cuda").to(dtype or u.dtype)


def compare(columns: Columns, grad: Tensor, scale_floor: float = 3e-6) -> None:
    exact, peer, found = (
        columns.by_torch(grad, torch.float64),
        columns.by_torch(grad),
        columns.ours(grad),
    )
    for name, expected in exact.items():
        assert found[name].dtype == getattr(columns, name).dtype
        rounding = torch.finfo(found[name].dtype).eps / 2
        floor = (scale_floor if name == "scale" else 3e-6) + rounding
        assert_no_worse(found[name], peer[name], expected, floor=floor, what=name)
        if name == "scale":  # what eps leaves: by subtraction next to nothing of it is right
            assert max_error(found[name], expected) < floor + 1e-5


SHAPES = [(333, 136), (65, 33), (4, 8), (5, 1), (4, 1030), (5000, 24), (700, 1100)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtypes", [(F32, F32), (BF16, BF16), (FP16, FP16), (BF16, F32), (FP16, F32)], ids=str
)
def test_gradients_match_float64(dtypes, shape, activation):
    columns = make(*shape, dtypes[0], activation)
    if dtypes[1] != dtypes[0]:
        compare(columns, gradient_like(columns.u, dtypes[1]))
    else:  # a result of u's dtype: without a scale, or with one of that dtype
        columns.scale = None
        compare(columns, gradient_like(columns.u))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_parameters_cast_along(dtype):
    columns = make(200, 136, dtype, "gelu", parameters=dtype)
    compare(columns, gradient_like(columns.u))


def test_no_parameters():
    columns = make(200, 136, activation="silu", vectors=False)
    compare(columns, gradient_like(columns.u))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mean", [1e4, -1e4])
def test_mean_far_from_zero(mean, activation):
    columns = make(1000, 40, activation=activation, mean=mean, std=1.0)
    compare(columns, gradient_like(columns.u))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_scale_zero(dtype, activation):
    columns = make(300, 40, dtype, activation)
    columns.scale.zero_()
    grad = gradient_like(columns.u, F32)
    exact, found = columns.by_torch(grad, torch.float64), columns.ours(grad)
    assert not found["u"].any()
    assert not found["gamma"].any()
    assert max_error(found["scale"], exact["scale"]) < 1e-5
    assert max_error(found["beta"], exact["beta"]) < 1e-5


def test_gradients_of_halves_do_not_overflow():
    columns = make(4096, 40, FP16)
    columns.scale = None
    grad = torch.full_like(columns.u, 6e4)
    found = columns.ours(grad)
    assert all(gradient.isfinite().all() for gradient in found.values())
    assert max_error(found["beta"], torch.full_like(found["beta"], 4096 * float(grad[0, 0]))) < 1e-6
    compare(columns, (gradient_like(columns.u, F32) * 5e2).half())


LAYOUTS = {
    "expanded from one": lambda t: torch.full((), 0.7, dtype=t.dtype, device=t.device).expand_as(t),
    "expanded rows": lambda t: torch.randn_like(t)[:1].expand_as(t),
    "expanded columns": lambda t: torch.randn_like(t)[:, :1].expand_as(t),
    "transposed": lambda t: torch.randn(*t.shape[::-1], device=t.device).to(t.dtype).t(),
    "strided": lambda t: torch.randn(t.size(0), 2 * t.size(1), device=t.device).to(t.dtype)[:, ::2],
    "cropped": lambda t: F.pad(torch.randn_like(t), (8, 8))[:, 8:-8],
    "cropped and misaligned": lambda t: F.pad(torch.randn_like(t), (1, 2))[:, 1:-2],
    "misaligned": lambda t: (
        torch.randn(t.numel() + 1, device=t.device).to(t.dtype)[1:].view(t.shape)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [48, 33])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_layout_of_the_gradient(dtype, n, layout):
    columns = make(77, n, dtype, "silu")
    grad = LAYOUTS[layout](columns.u.contiguous())
    for wanted in ("usgb", "b"):
        for activation in ("silu", None):
            columns.activation = activation
            expected, found = columns.ours(grad.contiguous(), wanted), columns.ours(grad, wanted)
            for name, gradient in found.items():
                rtol = torch.finfo(gradient.dtype).eps if gradient.dtype != F32 else 1e-5
                torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("wanted", ["u", "s", "g", "b", "sg", "gb", "ub", "us"])
def test_what_is_asked_for(wanted, activation):
    columns = make(200, 40, BF16, activation)
    grad = gradient_like(columns.u, F32)
    everything = columns.ours(grad)
    for name, gradient in columns.ours(grad, wanted).items():
        torch.testing.assert_close(gradient, everything[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_repeats_bit_for_bit(dtype, activation):
    columns = make(3000, 200, dtype, activation)
    grad = gradient_like(columns.u)
    first = columns.ours(grad)
    for _ in range(3):
        oracle.poison("cuda", columns.u.numel())
        assert all(
            torch.equal(a, b)
            for a, b in zip(first.values(), columns.ours(grad).values(), strict=True)
        )


@pytest.mark.parametrize("n", [40, 33])
@pytest.mark.parametrize("dtype", [F32, BF16, FP16], ids=str)
def test_gradient_of_the_weight(dtype, n):
    """u's gradient is in padded rows, of which the products read nothing else."""
    columns = make(200, n, dtype, "silu")
    grad, x = gradient_like(columns.u, F32), torch.randn(200, n, device="cuda").to(dtype)
    du = columns.ours(grad, "u")["u"]
    assert du.is_contiguous()
    oracle.poison("cuda", 200 * (n + 7), 100 * (n + 7))
    dw = columns.ours(grad, "u", x)["u"]
    assert dw.is_contiguous()
    assert_no_worse(dw, du.t() @ x, du.double().t() @ x.double(), what="weight")


def test_one_bad_value_stays_in_its_column():
    """Of u's gradient: in its row of weight's."""
    columns = make(300, 40, activation="gelu")
    grad, x = gradient_like(columns.u), torch.randn(300, 40, device="cuda")
    clean = columns.ours(grad, x=x)
    grad[7, 3] = float("nan")
    others = torch.tensor([c for c in range(40) if c != 3], device="cuda")
    for name, gradient in columns.ours(grad, x=x).items():
        assert torch.equal(gradient[others], clean[name][others])
        assert gradient[3].isnan().any()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)], ids=str)
def test_nothing(shape):
    u, stats, ones = (torch.ones(size, device="cuda") for size in (shape, (3, shape[1]), shape[1:]))
    vectors = (ones, ones, ones)
    weight = torch.ones(shape[1], 5, device="cuda")
    x = torch.ones(shape[0], 5, device="cuda")
    how = EPS, 0, FP32_PRODUCTS["ieee"], True, True, F32, F32, F32, F32
    dx, dw, *others = ops.backward(u, x, weight, u, stats, *vectors, *how)
    assert dx.shape == x.shape
    assert dw.shape == weight.shape
    assert not dx.any()
    assert not dw.any()
    assert all(not gradient.any() and gradient.shape == shape[1:] for gradient in others)
