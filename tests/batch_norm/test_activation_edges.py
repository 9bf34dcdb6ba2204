"""The batch-norm ops with an activation and a residual: values that are not finite, strides,
mistakes."""

import pytest
import torch
import torch.nn.functional as F
from activation_cases import (
    ACTIVATIONS,
    BF16,
    CODES,
    EPS,
    F16,
    F32,
    FEW_LAYOUTS,
    GRADIENTS,
    LAYOUTS,
    RECTIFIERS,
    Layout,
    make,
    ops,
)
from torch import Tensor

from cutlass_bn import library_is_loaded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not library_is_loaded(), reason="needs the compiled library"),
]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", FEW_LAYOUTS, ids=str)
def test_non_finite_values_stay_where_they_are(layout, activation, training, bad):
    """In x: in their channel, in eval in their element. In dy and the residual the same."""
    for where in ("x", "dy", "residual"):
        a = make(layout, F32, activation, True, training)
        y, stats = a.forward()
        names = a.gradients_of(GRADIENTS)
        clean = {"y": y, **a.backward(y, stats, *names)}
        tensor = getattr(a, where)
        tensor[1, 2].view(-1)[0:1].fill_(bad) if tensor.dim() == 2 else tensor[1, 2, 1, 1].fill_(
            bad
        )
        y, stats = a.forward()
        dirty = {"y": y, **a.backward(y, stats, *names)}
        others = [c for c in range(a.x.size(1)) if c != 2]
        for name, result in dirty.items():
            if name in ("dweight", "dbias"):
                assert torch.equal(result[others], clean[name][others]), (where, name)
            else:
                assert torch.equal(result[:, others], clean[name][:, others]), (where, name)
        if not training:
            for name in ("y", "dx"):
                differs = (dirty[name] != clean[name]) | (dirty[name].isnan())
                assert differs.sum() <= 1, (where, name)


def test_rectifiers_pass_on_what_torch_does():
    """NaN, infinities and zeros of v and of dy, in eval with an identity for BatchNorm."""
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0])
    x, dy = (t.reshape(-1, 1).cuda() for t in torch.meshgrid(values, values, indexing="ij"))
    zero, one = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    for activation in RECTIFIERS:
        code = CODES[activation]
        leaf = x.clone().requires_grad_()
        expected = ACTIVATIONS[activation](leaf)
        (expected_dx,) = torch.autograd.grad(expected, leaf, dy)
        for residual in (None, torch.zeros_like(x)):
            y = ops.batch_norm_inference(x, residual, zero, one, None, None, 0.0, code)
            torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
            after = None if residual is None else y
            dx, dresidual, *_ = ops.batch_norm_inference_backward(
                dy, x, zero, one, None, None, after, 0.0, code, True, after is not None, None, None
            )
            torch.testing.assert_close(dx, expected_dx, rtol=0, atol=0, equal_nan=True)
            if after is not None:
                torch.testing.assert_close(dresidual, dx, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_relu_of_every_value(dtype):
    """Half precision finds the sign of v by a threshold on x (batch_norm/relu_mask.cuh): the same
    for every x, maps of both signs and of extreme size."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(dtype)
    values = values[values.isfinite()]
    channels = 64
    x = values[: values.numel() // 8 * 8, None].expand(-1, channels).contiguous()
    mean, weight, bias = torch.randn(3, channels, device="cuda")
    mean[8:16] *= 1e4
    weight[16:24] *= 1e-30
    weight[20:24] = 0.0
    bias[24:32] *= 1e4
    bias[32:40] = 0.0
    var = torch.rand(channels, device="cuda") + 0.5
    vectors = (mean, var, weight, bias)
    v = ops.batch_norm_inference(x.float(), None, *vectors, EPS, 0)
    passes = ~(v <= 0)
    *_, dbias = ops.batch_norm_inference_backward(
        torch.ones_like(x), x, *vectors, None, EPS, 1, False, False, None, F32
    )
    assert torch.equal(dbias, passes.sum(0).float())


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_any_strides(training, activation):
    """Whatever does not lie as the input is copied; an input with gaps too, and vectors."""
    layout = Layout((6, 16, 8, 10), "channels_last", channels_last=True)
    a = make(layout, F32, activation, True, training)
    y, stats = a.forward()
    names = a.gradients_of(GRADIENTS)
    expected = {"y": y, **a.backward(y, stats, *names)}

    def gaps(t: Tensor) -> Tensor:
        return torch.stack([t, torch.full_like(t, float("nan"))], -1)[..., 0]

    original = a.x
    for other in (original.contiguous(), gaps(original), gaps(original.contiguous())):
        a.x = other
        a.residual, a.dy = a.residual.contiguous(), gaps(a.dy)
        a.weight, a.bias = gaps(a.weight), gaps(a.bias)
        y, stats = a.forward()
        peer = F.batch_norm(other, a.mean, a.var, None, None, True, 0.0, EPS)
        assert y.stride() == peer.stride()
        for name, result in {"y": y, **a.backward(y, stats, *names)}.items():
            torch.testing.assert_close(result, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", FEW_LAYOUTS, ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_same_bits_every_time(layout, activation):
    a = make(layout, BF16, activation, True, True)
    results = []
    for _ in range(3):
        y, stats = a.forward()
        results.append([y, *a.backward(y, stats, *GRADIENTS).values()])
    for other in results[1:]:
        assert all(torch.equal(first, then) for first, then in zip(results[0], other, strict=True))


def test_mistakes():
    a = make(LAYOUTS[4], F32, "relu", True, True)
    running = (a.mean, a.var, None)
    before = a.mean.clone()

    def training(x, residual, code=1):
        return ops.batch_norm_training(x, residual, *running, None, None, 0.1, EPS, code)

    with pytest.raises(RuntimeError, match=r"residual: expected shape \[6, 16, 7, 7\] like input"):
        training(a.x, a.residual[:, :, :1])
    with pytest.raises(RuntimeError, match="residual: expected float32 like input, got float16"):
        training(a.x, a.residual.half())
    with pytest.raises(RuntimeError, match="residual: expected a tensor on cuda"):
        training(a.x, a.residual.cpu())
    with pytest.raises(RuntimeError, match="activation: expected 0"):
        training(a.x, a.residual, 5)
    assert torch.equal(a.mean, before)
    y, stats = a.forward()

    def backward(after, code, residual_grad, x=a.x):
        return ops.batch_norm_backward(
            a.dy, x, stats, None, None, after, code, True, residual_grad, None, None
        )

    with pytest.raises(RuntimeError, match="after: expected a tensor, as the gradient of residual"):
        backward(None, 1, True)
    with pytest.raises(RuntimeError, match="residual_grad: expected False without an activation"):
        backward(None, 0, True)
    with pytest.raises(RuntimeError, match="input: expected a tensor, as the gradient of input"):
        backward(y, 1, True, None)
    with pytest.raises(RuntimeError, match=r"after: expected shape \[6, 16, 7, 7\] like grad"):
        backward(y[:1], 1, True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_empty(activation):
    layout = Layout((0, 5, 4, 4), "empty")
    a = make(layout, F32, activation, True, True)
    y, stats = a.forward()
    assert y.shape == a.x.shape
    gradients = a.backward(y, stats, *a.gradients_of(GRADIENTS))
    assert gradients["dx"].shape == a.x.shape
    assert torch.equal(gradients["dbias"], torch.zeros(5, device="cuda"))
