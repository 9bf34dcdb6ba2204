"""What `make gpu-sanitize` runs: each kernel once or twice, with remainders in every direction.

Inputs, expectations and comparisons are on the CPU, so that hardly any kernel but ours runs.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from batch_norm_cases import Shape
from linear_cases import (
    ACTIVATIONS,
    BF16,
    EPS,
    FP16,
    Case,
    fp32_precision,
    fused,
    gradients,
    hopper,
    make_layer,
    max_error,
    unfused,
)
from linear_cases import oracle as linear_oracle
from split_cases import excess, left_to_exact_kernel, normal, spanning

from cutlass_bn import BatchNorm2d, explain
from cutlass_bn._activations import CODES
from cutlass_bn.functional import batch_norm, linear_batch_norm
from cutlass_bn.ops import linear_batch_norm as linear_ops
from cutlass_bn.ops.product import FP32_PRODUCTS, fp32_matmul

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]

F32 = torch.float32


SHAPES = [
    Shape((3, 5, 33, 31), "planes without vectors"),
    Shape((2, 3, 100, 100), "planes on chip, in several pieces"),
    Shape((3, 7, 13, 24), "planes on chip, in vectors of eight", BF16),
    Shape((3, 140, 20, 20), "more channels than are on chip at a time"),
    Shape((40, 3, 52, 60), "channels on chip that blocks share", BF16),
    Shape((16, 1, 512, 520), "planes in vectors, too large to be on chip"),
    Shape((8, 12, 7, 7), "small planes in vectors"),
    Shape((8, 9, 5, 3), "small planes without vectors", BF16),
    Shape((2, 8, 9, 30), "channels last in vectors of eight", BF16, True),
    Shape((3, 5, 33, 31), "channels last without vectors", channels_last=True),
    Shape((2, 600, 3, 3), "channels last in several blocks side by side", FP16, True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm(shape):
    x = shape.randn()
    reference = BatchNorm2d(x.size(1), momentum=None)
    module, on_gpu = copy.deepcopy(reference).cuda(), x.cuda()
    with torch.no_grad():
        for training in (True, False):
            y, expected = module.train(training)(on_gpu), reference.train(training)(x)
            assert max_error(y.cpu(), expected) < (1e-2 if shape.dtype != F32 else 1e-5)
    assert module.num_batches_tracked.item() == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_batch_norm_backward(shape, training):
    x, grad = shape.randn(), shape.randn()
    module = BatchNorm2d(x.size(1)).train(training)
    reference, wide = copy.deepcopy(module).double(), x.double().requires_grad_()
    module, on_gpu = module.cuda(), x.cuda().requires_grad_()
    expected = torch.autograd.grad(reference(wide), [wide, *reference.parameters()], grad.double())
    gradients = torch.autograd.grad(module(on_gpu), [on_gpu, *module.parameters()], grad.cuda())
    for actual, wanted in zip(gradients, expected, strict=True):
        assert max_error(actual.cpu(), wanted) < (1e-2 if actual.dtype != F32 else 1e-5)
    # dbias alone: x is not read.
    (dbias,) = torch.autograd.grad(module(on_gpu), [module.bias], grad.cuda())
    assert max_error(dbias.cpu(), expected[2]) < 1e-5


def test_matrix_and_empty_batch():
    x = torch.randn(37, 5)
    mean, var = torch.zeros(5, device="cuda"), torch.ones(5, device="cuda")
    y = batch_norm(x.cuda(), mean, var, training=True)
    assert max_error(y.cpu(), batch_norm(x, None, None, training=True)) < 1e-5
    module = BatchNorm2d(3).cuda()
    assert module(torch.empty(0, 3, 4, 4, device="cuda")).numel() == 0
    assert module.num_batches_tracked.item() == 1


@pytest.mark.parametrize(
    ("sizes", "matrix", "columns"),
    [
        ((70, 136, 201), normal, False),
        ((70, 136, 201), normal, True),
        ((70, 136, 201), spanning(60), False),
        ((70, 136, 201), spanning(60), True),
        # So many tiles are large ones, on a GPU of 132 multiprocessors.
        ((8449, 65, 9), normal, False),
    ],
    ids=["rows", "columns", "rows, plain sums", "columns, plain sums", "large tiles"],
)
@hopper
def test_split_product(sizes, matrix, columns):
    m, n, k = sizes
    x, w = matrix(m, k, "cpu"), matrix(n, k, "cpu")
    assert left_to_exact_kernel(x, w).any() == (matrix is not normal)
    a, b = x.cuda(), w.t().contiguous().cuda()
    a, b = (t.t().contiguous().t() if columns else t for t in (a, b))
    u = fp32_matmul(a, b, FP32_PRODUCTS["split"], True)
    assert excess(u.cpu(), x, w, extra=8) <= 1


LINEAR = {  # and the tile where there are 132 multiprocessors, none of the portable path
    Case(70, 132, 36, "TF32, a small tile", tf32=True, activation="gelu"): "small",
    Case(70, 136, 40, "fp16, a small tile", FP16, scale=False, activation="relu"): "small",
    Case(70, 136, 72, "bf16, a small tile, float32 out", BF16, activation="silu"): "small",
    Case(1000, 1000, 8, "bf16, medium tiles", BF16, scale=False): "medium",
    Case(1985, 1000, 8, "bf16, large tiles", BF16, scale=False): "large",
    Case(70, 35, 24, "bf16, u with padded rows; portable in eval", BF16, scale=False): "small",
    Case(641, 820, 511, "split fp32, small tiles"): "split small",
    Case(1025, 900, 291, "split fp32, large tiles"): "split large",
    Case(70, 33, 25, "portable, nothing in vectors"): "",
    Case(70, 40, 25, "portable, float32 out of bf16", BF16): "",
    Case(2, 8, 8, "two rows", scale=False): "",
}


@pytest.mark.parametrize("case", LINEAR, ids=lambda case: case.why.replace(" ", "-"))
def test_linear_batch_norm(case):
    for training in (True, False):
        layer = make_layer(case, "cpu")
        if LINEAR[case].startswith("split"):  # a tile of either is left to the exact kernel
            layer.input[7, 8:] *= 2.0**-40
            layer.weight[5, :8] = 0.0
        on_gpu = layer.map(lambda t: t.cuda())
        on_gpu.num_batches_tracked = layer.num_batches_tracked.cuda()
        if training and torch.cuda.get_device_properties(0).multi_processor_count == 132:
            with fp32_precision(case.tf32):
                plan = explain(linear_batch_norm, **on_gpu.arguments(), training=True)
            assert plan.tile.startswith(LINEAR[case]), plan
            assert bool(plan.tile) == bool(LINEAR[case]), plan
        with torch.no_grad(), fp32_precision(case.tf32):
            y = fused(on_gpu, training, momentum=None if training else 0.1).cpu()
        exact, _ = linear_oracle(layer, training)
        assert max_error(y, exact) < (2e-2 if case.dtype != F32 or case.tf32 else 1e-5)


BACKWARD = pytest.mark.parametrize(
    "case", [list(LINEAR)[i] for i in (0, 1, 2, 5, 8)], ids=lambda case: case.why.replace(" ", "-")
)


SPLIT_BACKWARD = Case(1024, 1030, 519, "split fp32 in the backward", activation="gelu")


@pytest.mark.parametrize(
    ("case", "u_grad"),
    [*((list(LINEAR)[i], i == 8) for i in (0, 1, 2, 5, 8)), (SPLIT_BACKWARD, True)],
    ids=str,
)
def test_linear_batch_norm_backward(case, u_grad):
    """Of cuBLAS SGEMM alone. u_grad: the gradients of input and weight as well."""
    layer, dy = make_layer(case, "cuda"), torch.randn(case.m, case.n)
    x, w, b, s, mean, var, gamma, beta, *_ = layer.arguments().values()
    code, products = CODES[case.activation], FP32_PRODUCTS["tf32" if case.tf32 else "split"]
    buffers = mean, var, layer.num_batches_tracked
    how = 0.1, EPS, code, case.dtype, products
    _, u, stats = linear_ops.training(x, w, b, s, *buffers, gamma, beta, *how)
    for grad_dtype in {F32, case.dtype}:
        grad = dy.to(grad_dtype)
        known = grad.cuda(), x, w, u, stats, s, gamma, beta, EPS, code, products
        dx, dw, _, _, *found = linear_ops.backward(*known, u_grad, u_grad, None, F32, F32, F32)
        leaves = [t.double().cpu().requires_grad_() for t in (u, gamma, beta)]
        z = leaves[0] if s is None else leaves[0] * s.double().cpu()
        y = ACTIVATIONS[case.activation](F.batch_norm(z, None, None, *leaves[1:], True, 0.1, EPS))
        du, *expected = torch.autograd.grad(y, leaves, grad.double())
        if u_grad:
            found += [dx, dw]
            expected += [du @ w.double().cpu(), du.t() @ x.double().cpu()]
        for gradient, wanted in zip(found, expected, strict=True):
            assert max_error(gradient.cpu(), wanted) < (1e-2 if gradient.dtype != F32 else 1e-5)


@pytest.mark.cublas
@BACKWARD
def test_linear_batch_norm_step(case):
    """With the products: cuBLAS reads u's gradient to the end of its padded rows."""
    layer, dy = make_layer(case, "cpu"), torch.randn(case.m, case.n)
    on_gpu = layer.map(lambda t: t.cuda())
    on_gpu.num_batches_tracked = layer.num_batches_tracked.cuda()
    with fp32_precision(case.tf32):
        found = gradients(fused, on_gpu, True, dy.cuda())
    for name, expected in gradients(unfused, layer.double(), True, dy).items():
        if name not in ("bias", "scale"):
            assert max_error(found[name].cpu(), expected) < (
                3e-2 if case.dtype != F32 or case.tf32 else 1e-5
            ), name


@pytest.mark.parametrize(
    "sizes", [(1024, 2048, 1028), (1025, 2049, 1027)], ids=["in vectors", "without vectors"]
)
def test_transpose(sizes):
    """Before a product that is SGEMM's, whose kernels racecheck bears."""
    m, k, n = sizes
    a = torch.randint(-8, 9, (k, m), device="cuda", dtype=F32).t()
    b = torch.randint(-8, 9, (k, n), device="cuda", dtype=F32)
    c = fp32_matmul(a, b, FP32_PRODUCTS["tf32"])
    assert torch.equal(c.cpu().double(), a.cpu().double() @ b.cpu().double())
