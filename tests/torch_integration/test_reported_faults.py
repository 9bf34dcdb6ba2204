"""Faults that users found, each with its kind: wrong values, state and launches."""

from __future__ import annotations

import copy

import linear_cases
import oracle
import pytest
import torch
from linear_cases import Layer, assert_no_worse, fp32_precision, fused, hopper, unfused
from torch import Tensor, nn

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d, explain
from cutlass_bn.functional import batch_norm

BF16, FP16 = torch.bfloat16, torch.float16


def plain_layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Layer:
    """Without scale and activation, fresh running statistics, gamma 1.5 and beta 0.25."""
    n, device = weight.size(0), x.device
    return Layer(
        input=x,
        weight=weight,
        bias=bias,
        scale=None,
        running_mean=torch.zeros(n, device=device),
        running_var=torch.ones(n, device=device),
        gamma=torch.full((n,), 1.5, device=device),
        beta=torch.full((n,), 0.25, device=device),
        num_batches_tracked=torch.zeros((), dtype=torch.int64, device=device),
    )


def with_large_mean(m: int, n: int, k: int, dtype: torch.dtype, device: str, mean: float) -> Layer:
    """Columns of x weight^T of this mean and about unit spread; a bias takes the mean away."""
    root = mean**0.5
    x, weight = torch.randn(m, k), torch.randn(n, k) / k**0.5
    x[:, 0], weight[:, 0] = root, root
    bias = torch.randn(n) - mean
    return plain_layer(*(t.to(dtype).to(device) for t in (x, weight, bias)))


class TestBiasOfTheRoundedValue:
    """A Linear bias removes a large mean, in half precision: rounded with it, y would be noise."""

    @pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
    @pytest.mark.parametrize(
        "shape", [(2049, 264, 128), (130, 72, 40), (257, 35, 25), (64, 8, 8)], ids=str
    )
    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    def test_against_float64(self, device, dtype, shape, training):
        layer = with_large_mean(*shape, dtype, device, 1024.0)
        expected, after = linear_cases.oracle(layer, training)
        actual, peer = layer.clone(), layer.clone()
        oracle.poison(device, layer.input.size(0) * layer.weight.size(0))
        y, torch_y = fused(actual, training), unfused(peer, training)
        assert_no_worse(y, torch_y, expected, factor=1.5, floor=1e-3, what="y")
        assert linear_cases.max_error(y, expected) < 0.03
        for name in ("running_mean", "running_var"):
            assert_no_worse(
                getattr(actual, name),
                getattr(peer, name),
                getattr(after, name),
                floor=1e-5,
                what=name,
            )

    @pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
    @pytest.mark.parametrize("shape", [(300, 136, 64), (77, 35, 25)], ids=str)
    def test_gradients(self, device, dtype, shape):
        layer = with_large_mean(*shape, dtype, device, 1024.0)
        dy = torch.randn(shape[0], shape[1], device=device)
        expected = linear_cases.gradients(unfused, layer.double(), True, dy.double())
        ours = linear_cases.gradients(fused, layer.clone(), True, dy)
        theirs = linear_cases.gradients(unfused, layer.clone(), True, dy)
        assert not ours.pop("bias").any()
        for name, gradient in ours.items():
            assert_no_worse(gradient, theirs[name], expected[name], floor=2e-3, what=name)

    @pytest.mark.parametrize("parameter_dtype", [torch.float32, FP16], ids=str)
    def test_products_beyond_half_precision(self, device, parameter_dtype):
        """The product overflows float16; with the bias it does not."""
        m, n, k = 256, 64, 64
        x, weight = torch.randn(m, k), torch.randn(n, k) / 8
        x[:, 0], weight[:, 0] = 256.0, 256.0
        layer = plain_layer(
            x.half().to(device),
            weight.half().to(device),
            torch.full((n,), -65504.0).half().to(device),
        )
        layer = layer.map(lambda t: t if t.dtype == FP16 else t.to(parameter_dtype))
        expected, _ = linear_cases.oracle(layer, True)
        y = fused(layer.clone(), True)
        assert torch.isfinite(y).all()
        assert_no_worse(y, unfused(layer.clone(), True), expected, floor=1e-3, what="y")


class TestHugeValues:
    """Rows past M times infinity are not a number."""

    @staticmethod
    def layer(
        m: int, n: int, k: int, dtype: torch.dtype, device: str, magnitude: float, constant: bool
    ) -> Layer:
        x = torch.randn(1 if constant else m, k).expand(m, k).to(dtype).contiguous()
        return plain_layer(
            x.to(device), (torch.randn(n, k) * (magnitude / k**0.5)).to(dtype).to(device)
        )

    @pytest.mark.parametrize("m", [2049, 2050, 2056, 2063], ids=str)
    @pytest.mark.parametrize("magnitude", [1e20, 1e30], ids=str)
    @pytest.mark.parametrize("kind", ["bf16", "tf32", "ieee", "split"])
    def test_constant_columns(self, device, kind, magnitude, m):
        layer = self.layer(
            m, 640, 512, BF16 if kind == "bf16" else torch.float32, device, magnitude, True
        )
        with fp32_precision(kind == "tf32"):
            y = fused(layer, True, ieee_fp32=kind == "ieee")
        assert torch.equal(y, torch.full_like(y, 0.25))
        assert torch.equal(layer.running_var, torch.full_like(layer.running_var, 0.9))

    @pytest.mark.parametrize("magnitude", [1e20, 1e30], ids=str)
    @pytest.mark.parametrize("kind", ["bf16", "tf32", "split"])
    def test_variance_beyond_float32(self, device, kind, magnitude):
        """Its square overflows: y is beta, as torch's is, and the running variance infinite."""
        layer = self.layer(
            2049, 640, 512, BF16 if kind == "bf16" else torch.float32, device, magnitude, False
        )
        wide = torch.var(layer.input.double() @ layer.weight.double().t(), 0)
        with fp32_precision(kind == "tf32"):
            y = fused(layer, True)
        assert torch.isfinite(y).all()
        if device == "cuda":
            assert torch.equal(y, torch.full_like(y, 0.25))
        assert wide.min() > torch.finfo(torch.float32).max
        assert torch.isinf(layer.running_var).all()


class TestVarianceAtALargeMean:
    """float32 statistics of tiles need the remainder of their means: 1.2e-5 off without."""

    SHAPES = (
        (8, 3, 16, 16),
        (64, 3, 16, 16),
        (8, 65, 14, 14),
        (256, 64, 7, 7),
        (4, 8, 33, 33),
        (2, 3, 5, 7),
    )

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("sizes", SHAPES, ids=str)
    def test_running_var(self, device, sizes, layout):
        for seed in range(4):
            torch.manual_seed(seed)
            x = (torch.randn(sizes) + 1e4).to(device)
            if layout == "channels_last":
                x = x.to(memory_format=torch.channels_last)
            module = BatchNorm2d(sizes[1], momentum=1.0, device=device)
            module(x)
            exact = oracle.batch_norm(x)
            error = (module.running_var.double() - exact.unbiased).abs() / exact.unbiased
            assert error.max() < 1e-6
            assert (module.running_mean.double() - exact.mean).abs().max() <= 2**-24 * 1.6384e4

    @pytest.mark.parametrize("sizes", [(32768, 64), (5000, 3), (77, 130)], ids=str)
    def test_matrices(self, device, sizes):
        x = (torch.randn(sizes) + 1e4).to(device)
        running = torch.zeros(sizes[1], device=device), torch.ones(sizes[1], device=device)
        batch_norm(x, *running, training=True, momentum=1.0)
        exact = oracle.batch_norm(x)
        assert ((running[1].double() - exact.unbiased).abs() / exact.unbiased).max() < 1e-6


COUNTER_DTYPES = (torch.int32, torch.int16, torch.uint8, torch.float32, torch.float64, FP16, BF16)


class TestCounters:
    """Whatever a state dict or converter has made of num_batches_tracked, torch trains on."""

    @staticmethod
    def pair(
        kind: str, device: str, momentum: float | None
    ) -> tuple[nn.Module, nn.Module, nn.BatchNorm1d, Tensor]:
        """(ours, torch's, our BatchNorm, input)"""
        if kind == "B":
            ours, theirs = BatchNorm2d(5, momentum=momentum), nn.BatchNorm2d(5, momentum=momentum)
            return ours.to(device), theirs.to(device), ours, torch.randn(4, 5, 3, 3, device=device)
        ours = LinearBatchNorm1d(6, 5, momentum=momentum).to(device)
        theirs = nn.Sequential(copy.deepcopy(ours.gemm), copy.deepcopy(ours.bn))
        return ours, theirs, ours.bn, torch.randn(16, 6, device=device)

    @pytest.mark.parametrize("momentum", [0.1, None])
    @pytest.mark.parametrize("kind", ["B", "L"])
    @pytest.mark.parametrize("dtype", COUNTER_DTYPES, ids=str)
    def test_dtypes(self, device, dtype, kind, momentum):
        ours, theirs, bn, x = self.pair(kind, device, momentum)
        peer = theirs if kind == "B" else theirs[1]
        for norm in (bn, peer):
            norm.num_batches_tracked = norm.num_batches_tracked.to(dtype)
        self.train_both(ours, theirs, bn, peer, x)
        assert bn.num_batches_tracked.dtype == dtype
        assert bn.num_batches_tracked.device.type == device

    @pytest.mark.parametrize("momentum", [0.1, None])
    @pytest.mark.parametrize("kind", ["B", "L"])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
    @pytest.mark.gpu
    def test_on_the_cpu_beside_a_model_on_the_gpu(self, dtype, kind, momentum):
        ours, theirs, bn, x = self.pair(kind, "cuda", momentum)
        peer = theirs if kind == "B" else theirs[1]
        for norm in (bn, peer):
            norm.num_batches_tracked = norm.num_batches_tracked.to("cpu", dtype)
        self.train_both(ours, theirs, bn, peer, x)
        assert bn.num_batches_tracked.device.type == "cpu"

    @staticmethod
    def train_both(ours, theirs, bn, peer, x) -> None:
        for step in range(1, 4):
            batch = x + step
            torch.testing.assert_close(ours(batch), theirs(batch), rtol=2e-5, atol=2e-5)
            assert bn.num_batches_tracked.item() == step == peer.num_batches_tracked.item()
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(getattr(bn, name), getattr(peer, name), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, FP16], ids=str)
    def test_a_call_that_fails_counts_nothing(self, device, dtype):
        module = BatchNorm2d(5, momentum=None).to(device)
        module.num_batches_tracked = module.num_batches_tracked.to(dtype)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with pytest.raises(RuntimeError):
            module(torch.randn(2, 6, 3, 3, device=device))
        with pytest.raises(ValueError, match="more than 1 value"):
            module(torch.randn(1, 5, 1, 1, device=device))
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name]), name


class TestPartOfTheGpu:
    """A launch that the context refuses takes the two passes, and counts its batch once."""

    @pytest.mark.gpu
    @hopper
    @pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
    @pytest.mark.parametrize("momentum", [0.1, None])
    def test_green_context(self, momentum, captured):
        contexts = pytest.importorskip("torch.cuda.green_contexts")
        if not contexts.SUPPORTED:
            pytest.skip("this torch has no green contexts")
        x = torch.randn(64, 256, 56, 56, device="cuda").add_(2.0)
        grad = torch.randn_like(x)
        module = BatchNorm2d(256, momentum=momentum, device="cuda")
        assert explain(module, x).tile == "NCHW, on chip forward and backward"
        whole = copy.deepcopy(module)
        torch.cuda.synchronize()

        def step(norm: BatchNorm2d) -> list[Tensor]:
            leaf = x.detach().requires_grad_()
            y = norm(leaf)
            return [y.detach(), *torch.autograd.grad(y, [leaf, norm.weight, norm.bias], grad)]

        def run() -> list[Tensor]:
            if not captured:
                return step(module)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = step(module)
            graph.replay()
            return found

        context = contexts.GreenContext.create(
            num_sms=torch.cuda.get_device_properties(0).multi_processor_count // 2, device_id=0
        )
        context.set_context()
        try:
            actual = run()
            torch.cuda.synchronize()
        finally:
            context.pop_context()
        expected = step(whole)
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(buffer, whole.get_buffer(name), rtol=1e-6, atol=1e-6)
        assert module.num_batches_tracked.item() == 1
