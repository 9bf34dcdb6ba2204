"""Faults that users of such modules met, not in other files: sizes, layouts, state, errors."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from dataclasses import replace

import oracle
import pytest
import torch
import torch.nn.functional as F
from batch_norm_cases import Shape
from linear_cases import (
    BF16,
    FP16,
    TRAINING,
    Case,
    Layer,
    fp32_precision,
    fused,
    make_layer,
    max_error,
    unfused,
)
from linear_cases import oracle as linear_oracle
from torch import nn
from torch.utils.checkpoint import checkpoint

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d, explain
from cutlass_bn.functional import batch_norm, linear_batch_norm

F32 = torch.float32


SHAPES = [
    Shape((1, 1, 4097, 4097), "more than 2^24 values, which float32 cannot count"),
    Shape(((1 << 24) + 5, 1), "more than 2^24 rows of a matrix"),
    Shape((1, 70_000, 17, 17), "more large planes than a grid dimension has blocks"),
    Shape((70_000, 1, 17, 17), "more samples of large planes than a grid dimension has blocks"),
    Shape((1, 70_000, 9, 9), "more adjacent channels than that", channels_last=True),
    Shape((2, 3, 1, 4092), "a plane of one vector less than a block takes"),
    Shape((2, 3, 1, 4096), "a plane that a block takes exactly"),
    Shape((2, 3, 1, 4100), "a plane of one vector more"),
    Shape((2, 3, 1, 1025), "the same without vectors"),
    Shape((3, 7, 13, 20), "several planes in a block and some in the last", BF16),
    Shape((3, 100, 3, 85), "planes as wide as a block of columns may be"),
    Shape((3, 100, 1, 255), "the same in eight lanes", FP16),
    Shape((50, 513), "one channel more than 512"),
    Shape((50, 1000), "1000 channels in vectors of eight", BF16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_sizes(shape, device):
    if device == "cpu" and torch.Size(shape.sizes).numel() > 1.7e7:
        pytest.skip("a grid's limits: the CPU path has no grid, and takes seconds")
    x = shape.randn(device, mean=3.0, std=2.0)
    channels = x.size(1)
    mean, var = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    y = batch_norm(x, mean, var, training=True, momentum=1.0)
    exact = oracle.batch_norm(x)
    oracle.assert_y_keeps_contract(y, exact)
    assert oracle.error(mean, exact.mean) < 1e-6
    assert oracle.error(var, exact.unbiased) < 2e-6
    running = mean + 0.5, var * 2
    oracle.assert_y_keeps_contract(batch_norm(x, *running), oracle.batch_norm(x, running=running))


@pytest.mark.parametrize("value", [0.1, -1e4 / 3, 77777.0])
@pytest.mark.parametrize("rows", [3, 5, 6, 7])
@pytest.mark.parametrize("shape", [(51, 5), (5, 8, 7, 7)], ids=str)
def test_constant_channels_of_a_few_rows_per_thread(shape, rows, value, device):
    """A weight of 3 / 3 by an approximate division need not be 1, nor then the mean the value."""
    x = torch.full((rows * shape[0], *shape[1:]), value, device=device)
    mean, var = torch.zeros(x.size(1), device=device), torch.ones(x.size(1), device=device)
    y = batch_norm(x, mean, var, training=True, momentum=1.0)
    assert not y.any()
    assert torch.equal(mean, torch.full_like(mean, value))
    assert not var.any()


def test_more_rows_than_float32_can_count(device):
    """Small integers: u is exact in every precision, so the moments alone can be wrong."""
    m, k = (1 << 24) + 9, 8 if device == "cuda" else 1
    x = torch.randint(-3, 5, (m, k), device=device, dtype=torch.int8).float()
    weight, mean, var = (
        torch.ones(k, k, device=device),
        torch.zeros(k, device=device),
        torch.ones(k, device=device),
    )
    with fp32_precision(tf32=True):
        y = linear_batch_norm(x, weight, None, None, mean, var, training=True, momentum=1.0)
    exact = oracle.batch_norm(x.double() @ weight.double())
    assert oracle.error(mean, exact.mean) < 1e-6
    assert oracle.error(var, exact.unbiased) < 1e-6
    assert oracle.error(y, exact.y) < 1e-6


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("k", "n"), [(8, 4104), (4104, 8)], ids=["output", "input"])
def test_linear_with_more_than_2_to_the_31_elements(k, n):
    """Forward and backward; the first and the last channels against float64."""
    m = (1 << 19) + 3
    x = torch.randn(m, k, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.randn(n, k, device="cuda").mul_(k**-0.5).to(BF16).requires_grad_()
    gamma, beta = (torch.ones(n, device="cuda", requires_grad=True) for _ in range(2))
    y = linear_batch_norm(x, weight, None, None, None, None, gamma, beta, training=True)
    dy = torch.randn(m, n, device="cuda", dtype=BF16)
    y.backward(dy)
    for channels in (slice(0, 4), slice(n - 4, n)):
        w = weight[channels].detach().double().requires_grad_()
        u = torch.cat([part.double() @ w.t() for part in x.detach().split(1 << 16)])
        exact = F.batch_norm(u, None, None, None, None, True)
        wide_dy = dy[:, channels].double()
        # Roundings of y and of u to bfloat16, 2^-9 each, of values that reach six standard
        # deviations.
        assert (y[:, channels] - 1 - exact).abs().max() < 0.06
        assert max_error(beta.grad[channels], wide_dy.sum(0)) < 1e-3
        assert max_error(gamma.grad[channels], (wide_dy * exact).sum(0)) < 2e-2
        (dw,) = torch.autograd.grad(exact, w, wide_dy)
        assert max_error(weight.grad[channels], dw) < 2e-2
    if k * 2 < n:
        return
    last = slice(m - 8, m)  # the input's gradient, where a row takes all channels
    u = torch.cat(
        [part.detach().double() @ weight.detach().double().t() for part in x.split(1 << 16)]
    )
    u.requires_grad_()
    (du,) = torch.autograd.grad(F.batch_norm(u, None, None, None, None, True), u, dy.double())
    assert max_error(x.grad[last], du[last] @ weight.detach().double()) < 2e-2


EXACT_DTYPES = pytest.mark.parametrize(
    ("dtype", "tf32"),
    [(F32, False), (F32, True), (BF16, False), (FP16, False)],
    ids=["fp32", "tf32", "bf16", "fp16"],
)


@EXACT_DTYPES
def test_equal_rows_give_beta(dtype, tf32, device):
    """Dense rows, so the fused kernels run: a constant channel is beta exactly, its variance 0."""
    layer = make_layer(Case(131, 72, 64, "tails", dtype, scale=False, tf32=tf32), device)
    layer = replace(
        layer, input=torch.randint(-3, 4, (1, 64), device=device).to(dtype).repeat(131, 1)
    )
    layer.weight.copy_(torch.randint(-2, 3, (72, 64)))
    layer.beta.copy_(layer.beta.to(dtype))
    with fp32_precision(tf32):
        y = fused(layer, True, momentum=1.0)
    assert torch.equal(y, layer.beta.to(dtype).expand_as(y))
    assert torch.equal(layer.running_var, torch.zeros_like(layer.running_var))
    mean = (layer.input @ layer.weight.t())[0].float() + layer.bias.float()
    # It is of what is rounded.
    assert torch.equal(layer.running_mean, mean if dtype == F32 else mean.to(dtype).float())


@EXACT_DTYPES
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_values_stay_where_they_are(bad, dtype, tf32, device):
    """In their channel in training; in their row in eval."""
    layer = make_layer(Case(131, 72, 64, "tails", dtype, tf32=tf32), device)
    clean = layer.clone()
    layer.weight[5, 3] = bad
    others = torch.arange(72, device=device) != 5
    with fp32_precision(tf32):
        y, expected = fused(layer, True), fused(clean, True)
        assert torch.equal(y[:, others], expected[:, others])
        assert not y[:, 5].isfinite().any()
        assert torch.equal(layer.running_var[others], clean.running_var[others])
        clean.input[7, 3] = bad
        y = fused(clean, False)
    assert not y[7].isfinite().any()
    assert y[torch.arange(131, device=device) != 7].isfinite().all()


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@TRAINING
def test_eps_is_added_inside_the_root_of_the_fused_layer(eps, training, device):
    layer = make_layer(Case(100, 24, 16, "variances near eps"), device)
    layer.scale *= 1e-3
    layer.running_var *= 1e-6
    exact, _ = linear_oracle(layer, training, eps=eps)
    y = linear_batch_norm(**layer.arguments(), training=training, eps=eps)
    assert max_error(y, exact) < 1e-5


FORMATS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "expanded": lambda t: t[:1, :, :1, :1].expand_as(t),
    "transposed": lambda t: t.mT.contiguous().mT,
}


@pytest.mark.parametrize("gradient", FORMATS)
@TRAINING
def test_gradients_of_a_channels_last_input(gradient, training, device):
    x = (
        torch.randn(4, 8, 6, 5, device=device)
        .to(memory_format=torch.channels_last)
        .requires_grad_()
    )
    grad = FORMATS[gradient](torch.randn(4, 8, 6, 5, device=device))
    weight, buffers = (
        torch.rand(8, device=device),
        (torch.zeros(8, device=device), torch.ones(8, device=device)),
    )
    batch_norm(x, *buffers, weight, training=training).backward(grad)
    wide = x.detach().double().requires_grad_()
    mean, var = (torch.zeros(8, device=device).double(), torch.ones(8, device=device).double())
    F.batch_norm(wide, mean, var, weight.double(), training=training).backward(grad.double())
    assert (x.grad - wide.grad).abs().max() < 1e-5
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@TRAINING
def test_strided_parameters_and_buffers(training, device):
    """Columns of a table, say: F.batch_norm takes them."""
    x = torch.randn(6, 8, 5, 5, device=device)
    table = torch.rand(8, 4, device=device) + 0.5
    columns, dense = table.unbind(1), table.clone().unbind(1)
    dense = [column.contiguous() for column in dense]
    y = batch_norm(x, *columns, training=training)
    assert max_error(y, F.batch_norm(x, *dense, training=training)) < 1e-5
    assert max_error(table, torch.stack(dense, 1)) < 1e-6
    for vector in (columns[2], columns[2][:1].expand(8)):
        y = batch_norm(x, dense[0], dense[1], vector, vector, training)
        assert (
            max_error(
                y, batch_norm(x, dense[0], dense[1], vector.clone(), vector.clone(), training)
            )
            < 1e-6
        )


@TRAINING
@pytest.mark.parametrize(
    "shape", [(0, 3, 4, 4), (2, 3, 0, 4), (2, 0, 4, 4), (1, 0, 4, 4), (0, 0)], ids=str
)
def test_nothing_to_normalise(shape, training, device):
    x = torch.empty(shape, device=device, requires_grad=True)
    vectors = [torch.ones(shape[1], device=device) for _ in range(4)]
    y = batch_norm(x, *vectors, training=training)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    assert all((vector == 1).all() for vector in vectors)


@pytest.mark.parametrize("momentum", [0, 1, 0.0, 1.0])
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_momentum_at_its_limits(kind, momentum, device):
    """Integers as well: torch takes them."""
    if kind == "conv":
        ours, theirs, x = (
            BatchNorm2d(4, momentum=momentum),
            nn.BatchNorm2d(4, momentum=momentum),
            torch.rand(3, 4, 5, 5),
        )
    else:
        ours, x = LinearBatchNorm1d(6, 4, momentum=momentum), torch.rand(9, 6)
        theirs = nn.Sequential(copy.deepcopy(ours.gemm), nn.BatchNorm1d(4, momentum=momentum)).to(
            device
        )
    ours, theirs, x = ours.to(device), theirs.to(device), x.to(device)
    for _ in range(2):
        assert max_error(ours(x), theirs(x)) < 1e-5
    for mine, yours in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert max_error(mine, yours) < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_checkpointed_modules(kind, reentrant, device):
    """The forward runs twice, and counts twice, as torch's modules do."""
    module, x = (
        (BatchNorm2d(4), torch.randn(3, 4, 5, 5))
        if kind == "conv"
        else (LinearBatchNorm1d(6, 4, scale=True, activation="silu"), torch.randn(9, 6))
    )
    module, x = module.to(device), x.to(device).requires_grad_()
    plain = copy.deepcopy(module)
    (expected,) = torch.autograd.grad(plain(x).pow(3).sum(), x)
    checkpoint(module, x, use_reentrant=reentrant).pow(3).sum().backward()
    assert torch.equal(x.grad, expected)
    assert next(b for name, b in module.named_buffers() if "num_batches" in name) == 2


def test_three_dimensions_run_the_children(device):
    """Dim 1 is the channel dim, as in torch: normalising the features would be silently wrong."""
    module = LinearBatchNorm1d(12, 20, scale=True).to(device)
    children, x = copy.deepcopy(module), torch.rand(4, 20, 12, device=device)
    assert max_error(module(x), children.bn(children.gemm(x) * children.scale)) < 1e-5
    assert explain(module, x).path == "unfused modules"


@pytest.mark.parametrize("kind", [nn.Linear, nn.BatchNorm1d])
def test_a_forward_patched_for_all_modules_of_a_class(kind, monkeypatch, device):
    """What some LoRA loaders do."""
    module, x = LinearBatchNorm1d(6, 4).to(device).eval(), torch.randn(9, 6, device=device)
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: original(self, x) + 1)
    assert max_error(module(x), module.bn(module.gemm(x))) < 1e-6
    assert explain(module, x).path == "unfused modules"


def test_a_hook_that_comes_later_is_seen(device):
    module, x = LinearBatchNorm1d(6, 4).to(device).eval(), torch.randn(9, 6, device=device)
    before = module(x)
    handle = module.bn.register_forward_hook(lambda _, __, y: y + 1)
    assert max_error(module(x), before + 1) < 1e-5
    handle.remove()
    assert torch.equal(module(x), before)


@pytest.mark.gpu
def test_misaligned_half_precision():
    """In its own process: a misaligned address would take the CUDA context and other tests down."""
    script = """
        import torch
        from cutlass_bn.functional import batch_norm, linear_batch_norm

        def misaligned(t):
            storage = torch.empty(t.numel() + 1, dtype=t.dtype, device="cuda")
            return storage[1:].view(t.shape).copy_(t)

        def results(function, tensors):
            tensors = [t.detach().requires_grad_() for t in tensors]
            y = function(*tensors)
            return [y, *torch.autograd.grad(y.float().pow(3).sum(), tensors)]

        of_linear, of_conv = [(64, 24), (40, 24), (40,)], [(4, 8, 24, 24), (8,), (8,)]
        for dtype in (torch.float16, torch.bfloat16):
            for training in (True, False):
                def linear(x, w, b):
                    buffers = torch.zeros(40, device="cuda"), torch.ones(40, device="cuda")
                    return linear_batch_norm(x, w, b, None, *buffers, training=training)
                def conv(x, w, b):
                    buffers = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
                    return batch_norm(x, *buffers, w, b, training)
                for function, shapes in ((linear, of_linear), (conv, of_conv)):
                    aligned = [torch.randn(s, device="cuda").mul(0.5).to(dtype) for s in shapes]
                    expected = results(function, aligned)
                    found = results(function, [misaligned(t) for t in aligned])
                    for ours, wanted in zip(found, expected):
                        error = (ours.double() - wanted.double()).abs().max()
                        error /= wanted.double().abs().max().clamp(min=1)
                        assert error < 2e-2, (function, dtype, training, error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_large_mean_in_exact_tf32(device):
    """Operands that TF32 holds exactly: fused kernels run, and batch norm alone can lose digits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(513, 8)
    x[:, 0], x[:, 1] = 9984.0, torch.randint(-512, 512, (513,), generator=generator) / 256
    weight = torch.zeros(16, 8)
    weight[:, :2] = 1.0
    layer = Layer(x.to(device), weight.to(device), None, None, None, None, None, None)
    exact = unfused(layer.double(), True)
    with fp32_precision(tf32=True):
        y = fused(layer, True)
    std = x[:, 1].double().std(correction=0).item()
    # The contract, four times: a tile's mean is rounded to float32 at each of its merges.
    assert (y.double() - exact).abs().max() <= 4 * 2**-23 * 9984 / std + 1e-5
