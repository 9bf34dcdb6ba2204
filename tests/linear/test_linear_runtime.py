"""LinearBatchNorm1d under torch.compile, autocast, CUDA graphs, streams and other devices."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from linear_cases import BF16, FP16, TRAINING, fp32_precision, max_error
from torch._dynamo.testing import CompileCounterWithBackend

from cutlass_bn import LinearBatchNorm1d
from cutlass_bn.functional._linear_batch_norm import fp32_products
from cutlass_bn.ops.product import FP32_PRODUCTS


def module_and_input(device, m=130, k=64, n=136, **options):
    torch.manual_seed(0)
    module = LinearBatchNorm1d(k, n, scale=True, activation="gelu", **options).to(device)
    return module, torch.randn(m, k, device=device)


def separate(module, x):
    return F.gelu(module.bn(module.gemm(x) * module.scale))


@TRAINING
def test_compile(training, device):
    """One graph, buffers mutated in it, gradients through it; other batch sizes don't break it."""
    check_compiled("aot_eager", training, device)


@pytest.mark.gpu
@pytest.mark.slow
@TRAINING
def test_compile_to_kernels(training):
    check_compiled("inductor", training, "cuda")


def check_compiled(backend, training, device):
    torch.compiler.reset()
    module, x = module_and_input(device)
    module.train(training)
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for batch in (x, x[:77], x[:33]):
        y, expected = compiled(batch), eager(batch)
        assert max_error(y, expected) < 1e-5
        y.square().sum().backward()
        expected.square().sum().backward()
    for (name, ours), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
        if name not in ("gemm.bias", "scale"):  # cancel in training
            assert max_error(ours.grad, theirs.grad) < 1e-4, name
    for (name, ours), theirs in zip(module.named_buffers(), eager.buffers(), strict=True):
        assert max_error(ours, theirs) < 1e-5, name
    assert module.bn.num_batches_tracked == 3 * training


def test_the_precision_switch_is_a_constant_that_dynamo_guards():
    def function(x, ieee_fp32):
        return x + fp32_products(x, ieee_fp32)

    compiled, x = torch.compile(function, fullgraph=True, backend="eager"), torch.zeros(1)

    def check(full_precision: bool) -> None:
        for ieee_fp32, kind in ((False, "split"), (True, "ieee")):
            expected = FP32_PRODUCTS[kind if full_precision else "tf32"]
            assert compiled(x, ieee_fp32) == function(x, ieee_fp32) == expected

    try:
        for precision in ("ieee", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            check(precision == "ieee")
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            check(precision == "highest")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float64], ids=str)
def test_the_precision_switch_is_not_looked_at_for_other_dtypes(dtype):
    x = torch.zeros(1, dtype=dtype)
    for tf32 in (False, True):
        with fp32_precision(tf32):
            assert fp32_products(x, False) == fp32_products(x, True) == FP32_PRODUCTS["ieee"]


LARGE = {"m": 1100, "k": 1024, "n": 1040}  # where float32 products are split
SETTINGS = [(tf32, ieee_fp32) for tf32 in (False, True) for ieee_fp32 in (False, True)]


def test_the_precision_switch_costs_one_compilation_for_each_kind_of_products():
    torch.compiler.reset()
    compilations = CompileCounterWithBackend("eager")
    x = torch.zeros(1)

    @torch.compile(fullgraph=True, backend=compilations)
    def function(x, ieee_fp32):
        return x + fp32_products(x, ieee_fp32)

    for tf32, ieee_fp32 in SETTINGS * 3:
        with fp32_precision(tf32):
            function(x, ieee_fp32)
    assert compilations.frame_count == len(FP32_PRODUCTS)


@pytest.mark.gpu
@TRAINING
def test_compiled_code_follows_the_precision_switch(training):
    """PyTorch's and the module's own: compiled code gives the bits that are computed without."""
    # Dynamo's limit is on the compilations of one function, here of all modules' forward.
    torch.compiler.reset()
    module, x = module_and_input("cuda", **LARGE)
    compilations = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module.train(training), fullgraph=True, backend=compilations)
    exact = separate(copy.deepcopy(module).double(), x.double())
    with torch.no_grad():
        for tf32, module.ieee_fp32 in SETTINGS * 2:
            with fp32_precision(tf32):
                y = compiled(x)
                assert torch.equal(y, module(x))
                assert (max_error(y, exact) > 2e-5) == tf32
    assert compilations.frame_count == len(FP32_PRODUCTS)


@TRAINING
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast(dtype, scale, training, device):
    """As the separate modules: Linear in autocast's dtype, the rest as promoted; fp32 gradients."""
    module, x = module_and_input(device)
    if not scale:
        module.scale = None
    module.train(training)
    other = copy.deepcopy(module)
    with torch.autocast(device, dtype=dtype):
        y = module(x)
        z = other.gemm(x)
        expected = F.gelu(other.bn(z if other.scale is None else z * other.scale))
    assert y.dtype == expected.dtype == (torch.float32 if scale else dtype)
    assert max_error(y, expected) < 3e-2
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    for (name, ours), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32, name
        if not (training and name in ("gemm.bias", "scale")):
            assert max_error(ours.grad, theirs.grad) < 5e-2, name
    for (name, ours), theirs in zip(module.named_buffers(), other.buffers(), strict=True):
        assert max_error(ours, theirs) < 2e-2, name


@TRAINING
def test_inference_mode(training, device):
    module, x = module_and_input(device)
    module.train(training)
    expected = separate(copy.deepcopy(module), x)
    with torch.inference_mode():
        assert max_error(module(x), expected) < 1e-5


def test_no_grad_records_nothing(device):
    module, x = module_and_input(device)
    with torch.no_grad():
        assert not module(x).requires_grad
    assert module(x).requires_grad
    assert not module.requires_grad_(False)(x).requires_grad


@pytest.mark.gpu
@TRAINING
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.float32, {}), (BF16, {}), (torch.float32, LARGE)],
    ids=["fp32", "bf16", "split fp32"],
)
def test_cuda_graph(dtype, sizes, training):
    """Captured once, replayed: no synchronisation; counter and running statistics advance."""
    module, x = module_and_input("cuda", momentum=None, **sizes)
    module, x = module.to(dtype).train(training), x.to(dtype)
    eager = copy.deepcopy(module)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            module(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        eager(x)
        for step in range(1, 4):
            x.copy_(torch.randn_like(x) + step)
            graph.replay()
            assert max_error(y, eager(x)) < 1e-5
    assert module.bn.num_batches_tracked == 4 * training
    for (name, ours), theirs in zip(module.named_buffers(), eager.buffers(), strict=True):
        assert max_error(ours, theirs) < 1e-5, name


@pytest.mark.gpu
@TRAINING
def test_side_stream(training):
    """Everything is enqueued on the current stream: work that is queued there first is seen."""
    module, x = module_and_input("cuda", m=4096)
    module.train(training)
    expected = copy.deepcopy(module)(x * 2)
    late = x.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.mul_(2)
        y = module(late)
    stream.synchronize()
    assert max_error(y, expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{}, LARGE], ids=["small", "large"])
def test_does_not_synchronise(sizes):
    module, x = module_and_input("cuda", **sizes)
    module(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x).sum().backward()
        module.eval()(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@TRAINING
def test_device_that_is_not_current(training):
    module, x = module_and_input("cuda:1")
    module.train(training)
    expected = separate(copy.deepcopy(module), x)
    assert torch.cuda.current_device() == 0
    y = module(x)
    assert y.device == x.device
    assert max_error(y, expected) < 1e-5
    assert torch.cuda.current_device() == 0
