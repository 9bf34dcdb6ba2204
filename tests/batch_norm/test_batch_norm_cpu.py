"""BatchNorm on CPU tensors against float64, PyTorch's strides, and what the ops change."""

from __future__ import annotations

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cutlass_bn import cpu

EPS = 1e-5
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=lambda dtype: str(dtype)[6:])
# By how statistics are taken: in one sum or in groups, with and without a rest; of rows, planes,
# channels_last.
MATRICES = [(2, 3), (127, 5), (1000, 3), (300, 1030)]
SHAPES = [*MATRICES, (64, 7, 5), (3, 1, 50), (8, 4, 4, 4), (37, 3, 30, 9), (4, 5, 3, 2, 6)]
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "strided": lambda x: torch.stack((x, x + 1.0), -1)[..., 0],
    "permuted": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced channels last": lambda x: (
        torch.cat((x, x)).movedim(1, -1).contiguous().movedim(-1, 1)[::2]
    ),
}
LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
ONE = [tuple(i == asked for i in range(3)) for asked in range(3)]
SUBSETS = [(True, True, True), *ONE, (True, True, False)]
CHANNELS_LAST = pytest.mark.parametrize("layout", ["contiguous", "channels last"])
ids = {"ids": str}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def randn(shape, dtype=F32, mean=0.0, std=1.0, layout="contiguous") -> Tensor:
    return LAYOUTS[layout]((torch.randn(shape, dtype=F64) * std + mean).to(dtype))


def vectors(channels: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    """A weight, with one of 0, and a bias."""
    weight = torch.randn(channels)
    weight[-1] = 0.0
    return weight.to(dtype), torch.randn(channels).to(dtype)


def buffers(channels: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(channels).to(dtype), torch.rand(channels).to(dtype), torch.tensor(3)


def forward(x: Tensor, *others) -> tuple[Tensor, Tensor]:
    """Here and below: without residual and activation."""
    return cpu.batch_norm_training(x, None, *others, 0)


def evaluate(x: Tensor, *others) -> Tensor:
    return cpu.batch_norm_inference(x, None, *others, 0)


def backward(grad, x, stats, weight, input_grad, *dtypes) -> tuple[Tensor, Tensor, Tensor]:
    known = grad, x, stats, weight, None, None, 0
    dx, dresidual, *vectors = cpu.batch_norm_backward(*known, input_grad, False, *dtypes)
    assert dresidual.shape == (0,)
    return dx, *vectors


def evaluate_backward(grad, x, mean, var, weight, eps, input_grad, *dtypes):
    known = grad, x, mean, var, weight, None, None, eps, 0
    dx, dresidual, *vectors = cpu.batch_norm_inference_backward(*known, input_grad, False, *dtypes)
    assert dresidual.shape == (0,)
    return dx, *vectors


def train(x: Tensor, weight=None, bias=None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, stats, and the mean and unbiased variance of the batch as the running ones take them."""
    mean, var, _ = buffers(x.size(1), F64 if x.dtype == F64 else F32)
    return *forward(x, mean, var, None, weight, bias, 1.0, EPS), mean, var


def assert_close(
    actual: Tensor, expected: Tensor, rtol: float, scale: Tensor | float = 0.0
) -> None:
    error = (actual.double() - expected.double()).abs() - rtol * (expected.double().abs() + scale)
    assert error.max().item() <= 0, (
        f"off by {(actual.double() - expected.double()).abs().max().item():.3g}"
    )


# ---- BatchNorm: training


@pytest.mark.parametrize("shape", SHAPES, **ids)
@LAYOUT
@DTYPES
def test_training(shape, layout, dtype):
    x = randn(shape, dtype, 0.5, 1.5, layout)
    weight, bias = vectors(shape[1])
    before, exact = x.clone(), oracle.batch_norm(x, weight, bias)
    mean, var, counter = buffers(shape[1])
    expected_mean, expected_var = (
        0.7 * old.double() + 0.3 * new for old, new in ((mean, exact.mean), (var, exact.unbiased))
    )
    y, stats = forward(x, mean, var, counter, weight, bias, 0.3, EPS)
    oracle.assert_y_keeps_contract(y, exact, weight)
    assert stats.shape == (3, shape[1])
    assert stats.dtype == (F64 if dtype == F64 else F32)
    std = (exact.var + EPS).sqrt()
    assert_close(stats[0].double() + stats[1], exact.mean, 2**-23, 4 * std)
    assert_close(stats[2], 1.0 / std, 1e-6)
    assert_close(mean, expected_mean, 2**-22, 4 * std)
    assert_close(var, expected_var, 2e-6)
    assert counter.item() == 4
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", SHAPES, **ids)
@LAYOUT
@DTYPES
def test_strides_are_those_of_torch(shape, layout, dtype):
    module = getattr(torch.nn, f"BatchNorm{max(len(shape) - 2, 1)}d")
    module = module(shape[1], dtype=F64 if dtype == F64 else F32)
    x, grad = randn(shape, dtype, layout=layout), randn(shape, dtype)
    mean, var, counter = buffers(shape[1], module.weight.dtype)
    for training in (True, False):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            theirs = module.train(training)(leaf)
            (their_dx,) = torch.autograd.grad(theirs, leaf, grad)
        if training:
            y, stats = forward(x, mean, var, counter, None, None, 0.1, EPS)
            dx, _, _ = backward(grad, x, stats, None, True, None, None)
        else:
            y = evaluate(x, mean, var, None, None, EPS)
            dx, _, _ = evaluate_backward(grad, x, mean, var, None, EPS, True, F32, None)
        assert (y.dtype, y.shape, y.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert (dx.dtype, dx.shape, dx.stride()) == (
            their_dx.dtype,
            their_dx.shape,
            their_dx.stride(),
        )


@pytest.mark.parametrize(
    ("dtype", "parameters", "statistics"),
    [(BF16, BF16, BF16), (F16, F32, F16), (F32, BF16, F32), (F32, F64, F64), (F64, F32, F32)],
)
def test_dtypes_of_vectors(dtype, parameters, statistics):
    x, (weight, bias) = randn((200, 6, 4, 4), dtype, 3.0), vectors(6, parameters)
    # They are strided, too.
    weight, bias = (torch.stack((vector, vector), 1)[:, 0] for vector in (weight, bias))
    mean, var, counter = buffers(6, statistics)
    exact = oracle.batch_norm(x, weight, bias)
    expected = 0.9 * mean.double() + 0.1 * exact.mean, 0.9 * var.double() + 0.1 * exact.unbiased
    y, _ = forward(x, mean, var, counter, weight, bias, 0.1, EPS)
    oracle.assert_y_keeps_contract(y, exact, weight)
    for actual, value in zip((mean, var), expected, strict=True):
        assert actual.dtype == statistics
        assert_close(actual, value, 0.51 * torch.finfo(statistics).eps + 2e-6)
    y = evaluate(x, mean, var, weight, bias, EPS)
    oracle.assert_y_keeps_contract(
        y, oracle.batch_norm(x, weight, bias, running=(mean, var)), weight
    )


@pytest.mark.parametrize("mean", [8.0, 100.0, -1e4, 1e6])
@pytest.mark.parametrize("shape", [(300, 5), (5000, 3), (16, 8, 40, 40), (40, 6, 3, 3)], **ids)
@CHANNELS_LAST
def test_a_large_mean(mean, shape, layout):
    x, (weight, bias) = randn(shape, mean=mean, layout=layout), vectors(shape[1])
    exact = oracle.batch_norm(x, weight, bias)
    y, stats, running_mean, running_var = train(x, weight, bias)
    oracle.assert_y_keeps_contract(y, exact, weight)
    if abs(mean) <= 1e4:
        assert_close(running_var, exact.unbiased, 1e-6)
    assert_close(running_mean, exact.mean, 2**-23)
    assert_close(stats[0].double() + stats[1], exact.mean, 2**-23)
    running = (exact.mean.float(), exact.var.float())
    y = evaluate(x, *running, weight, bias, EPS)
    oracle.assert_y_keeps_contract(y, oracle.batch_norm(x, weight, bias, running=running), weight)


@CHANNELS_LAST
@pytest.mark.parametrize("outlier", [30.0, 1e4])
def test_a_first_value_far_from_the_others(outlier, layout):
    x = randn((500, 4, 3, 3), mean=9.0)
    x[0, :, 0, 0] = outlier
    x = LAYOUTS[layout](x)
    exact = oracle.batch_norm(x)
    y, _, _, var = train(x)
    oracle.assert_y_keeps_contract(y, exact)
    assert_close(var, exact.unbiased, 1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e4 + 0.1, -7e-5, 1e30])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1], **ids)
@CHANNELS_LAST
@DTYPES
def test_constant_channels(value, shape, layout, dtype):
    x = randn(shape, mean=9.0).to(dtype)
    x[:, 1:] = min(value, torch.finfo(dtype).max)
    x, (weight, bias) = LAYOUTS[layout](x), vectors(shape[1], F64 if dtype == F64 else F32)
    y, _, mean, var = train(x, weight, bias)
    assert torch.equal(
        y[:, 1:], bias[1:].to(dtype).view([1, -1] + [1] * (x.dim() - 2)).expand_as(y[:, 1:])
    )
    assert not var[1:].any()
    assert torch.equal(mean[1:], x[0].reshape(shape[1], -1)[1:, 0].to(mean.dtype))
    oracle.assert_y_keeps_contract(
        y[:, :1], oracle.batch_norm(x[:, :1], weight[:1], bias[:1]), weight[:1]
    )


@pytest.mark.parametrize("size", [1e19, 1e20, 1e30])
@pytest.mark.parametrize("shape", [(300, 5), (16, 5, 9, 9)], **ids)
@CHANNELS_LAST
def test_huge_values(size, shape, layout):
    x = randn(shape)
    x[:, 2:] *= size
    x = LAYOUTS[layout](x)
    exact = oracle.batch_norm(x)
    y, stats, _, _ = train(x)
    oracle.assert_y_keeps_contract(y, exact)
    assert_close(stats[2], (exact.var + EPS).rsqrt(), 1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(300, 5), (16, 5, 9, 9)], **ids)
@pytest.mark.parametrize("mean", [0.0, 1e4])
@CHANNELS_LAST
def test_what_is_not_finite_stays_in_its_channel_or_row(value, shape, mean, layout):
    x = randn(shape, mean=mean)
    x[3, 1] = value
    x = LAYOUTS[layout](x)
    others, exact = [0, 2, 3, 4], oracle.batch_norm(x[:, [0, 2, 3, 4]])
    y, _, _, running_var = train(x)
    assert y[:, 1].isnan().all()
    assert not running_var[1].isfinite()
    oracle.assert_y_keeps_contract(y[:, others], exact)
    assert_close(running_var[others], exact.unbiased, 1e-6)
    running = (torch.full((5,), mean), torch.ones(5))
    y = evaluate(x, *running, None, None, EPS)
    assert not y[3, 1].isfinite().any()
    x[3], y[3] = mean, 0.0
    oracle.assert_y_keeps_contract(y, oracle.batch_norm(x, running=running))


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4, 4)], **ids)
def test_a_variance_of_zero_without_eps(shape):
    """NaN at the mean, infinite on either side of it, in that channel alone."""
    x = randn(shape)
    x[:3, 1] = torch.tensor([1.0, 2.0, 3.0]).view([3] + [1] * (x.dim() - 2))
    mean, var = torch.tensor([0.0, 2.0, 0.0]), torch.tensor([1.0, 0.0, 1.0])
    y = evaluate(x, mean, var, None, None, 0.0)
    assert (y[0, 1] == -torch.inf).all()
    assert y[1, 1].isnan().all()
    assert (y[2, 1] == torch.inf).all()
    assert torch.equal(y[:, ::2], x[:, ::2])


@CHANNELS_LAST
def test_sums_of_float16_do_not_overflow(layout):
    x = randn((64, 3, 16, 16), F16, 6e4, 100.0, layout)
    exact = oracle.batch_norm(x)
    y, _, mean, var = train(x)
    oracle.assert_y_keeps_contract(y, exact)
    assert_close(mean, exact.mean, 1e-6)
    assert_close(var, exact.unbiased, 2e-6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, F32, F16])
def test_cumulative_average(dtype):
    batches = randn((4, 50, 3))
    mean, var, counter = torch.full((3,), 5.0), torch.full((3,), 5.0), torch.zeros((), dtype=dtype)
    for x in batches:
        forward(x, mean, var, counter, None, None, None, EPS)
    assert_close(mean, batches.double().mean((0, 1)), 1e-6, 0.1)
    assert_close(var, batches.double().var(1).mean(0), 1e-6)
    assert (counter.item(), counter.dtype) == (4, dtype)


def test_a_call_that_fails_changes_nothing():
    x, (mean, var, _) = randn((5, 3)), buffers(3)
    before = mean.clone(), var.clone()
    with pytest.raises(ValueError, match="num_batches_tracked"):
        forward(x, mean, var, None, None, None, None, EPS)
    counter = torch.tensor(3)
    with pytest.raises(RuntimeError):
        cpu.linear_batch_norm_training(
            x, randn((3, 4)), None, None, mean, var, counter, None, None, 0.1, EPS, 0, F32, 0
        )
    assert counter.item() == 3
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4, 4), (2, 3, 0)], **ids)
@DTYPES
def test_empty_batch(shape, dtype):
    x, (mean, var, counter) = torch.empty(shape, dtype=dtype), buffers(3)
    before = mean.clone(), var.clone()
    y, stats = forward(x, mean, var, counter, None, None, 0.1, EPS)
    assert (y.shape, y.dtype, counter.item()) == (shape, dtype, 4)
    assert stats.shape == (3, 3)
    assert not stats.any()
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    assert evaluate(x, mean, var, None, None, EPS).shape == shape
    for gradients in (
        backward(y, x, stats, None, True, F32, BF16),
        evaluate_backward(y, x, mean, var, None, EPS, True, F32, BF16),
    ):
        assert gradients[0].shape == shape
        for gradient, expected in zip(gradients[1:], (F32, BF16), strict=True):
            assert (gradient.shape, gradient.dtype) == ((3,), expected)
            assert not gradient.any()


# ---- BatchNorm: gradients


def exact_gradients(x, grad, weight, running=(None, None)) -> list[Tensor]:
    with torch.enable_grad():
        x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
        bias = torch.zeros_like(weight).requires_grad_()
        statistics = (None if statistic is None else statistic.double() for statistic in running)
        y = F.batch_norm(x, *statistics, weight, bias, running[0] is None, 0.0, EPS)
        return list(torch.autograd.grad(y, (x, weight, bias), grad.double()))


def assert_gradients(found, exact, grad, subset, dtypes) -> None:
    """By the rounding of results and, in float32, of 16 units in the last place of the largest
    terms: those of dx are a few times invstd * weight * grad; of a sum of n, by random signs,
    sqrt(n) of them, and grad's mean times n.
    """
    terms = 4.0 * (oracle.spread(grad) + grad.double().sum().abs().item() / grad.size(1))
    for actual, expected, wanted, dtype in zip(found, exact, subset, dtypes, strict=True):
        if not wanted:
            assert actual.shape == (0,)
            continue
        assert (actual.shape, actual.dtype) == (expected.shape, dtype)
        slack = 1e-13 if dtype == F64 else 2**-19
        assert_close(
            actual,
            expected,
            0.51 * torch.finfo(dtype).eps + slack,
            8.0 if actual.dim() > 1 else terms,
        )


@pytest.mark.parametrize("subset", SUBSETS, **ids)
@pytest.mark.parametrize("shape", [(300, 5), (8, 4, 4, 4), (6, 3, 30, 9)], **ids)
@pytest.mark.parametrize(
    ("dtype", "parameters"),
    [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16), (F16, F32), (F64, F64)],
    **ids,
)
@pytest.mark.parametrize(
    "layouts",
    [("contiguous", "channels last"), ("channels last", "strided"), ("permuted",) * 2],
    **ids,
)
def test_gradients(subset, shape, dtype, parameters, layouts):
    x, grad = randn(shape, dtype, 2.0, 1.0, layouts[0]), randn(shape, dtype, 0.5, 1.0, layouts[1])
    weight, _ = vectors(shape[1], parameters)
    asked = (subset[0], parameters if subset[1] else None, parameters if subset[2] else None)
    dtypes = dtype, parameters, parameters
    _, stats, _, _ = train(x)
    needed = (x, stats, weight) if subset[0] or subset[1] else (None, None, None)
    found = backward(grad, *needed, *asked)
    assert_gradients(found, exact_gradients(x, grad, weight), grad, subset, dtypes)

    running = torch.full((shape[1],), 2.0), torch.rand(shape[1]) + 0.5
    running = tuple(statistic.to(parameters) for statistic in running)
    needed = (x, running[0]) if subset[1] else (None, None)
    found = evaluate_backward(grad, *needed, running[1], weight, EPS, *asked)
    assert_gradients(found, exact_gradients(x, grad, weight, running), grad, subset, dtypes)


@pytest.mark.parametrize("mean", [100.0, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(300, 5), (16, 4, 20, 20)], **ids)
@CHANNELS_LAST
def test_gradients_at_a_large_mean(mean, shape, layout):
    """As exact as at zero: what the rounded mean lacks is in stats."""
    x, grad, (weight, _) = (
        randn(shape, mean=mean, layout=layout),
        randn(shape, mean=1.0),
        vectors(shape[1]),
    )
    _, stats, _, _ = train(x)
    found = backward(grad, x, stats, weight, True, F32, F32)
    assert_gradients(found, exact_gradients(x, grad, weight), grad, (True,) * 3, (F32,) * 3)
