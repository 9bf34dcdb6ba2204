"""What only a CUDA device can show: streams, graphs, devices, that nothing waits, and size."""

import oracle
import pytest
import torch

from cutlass_bn import BatchNorm2d
from cutlass_bn.functional import batch_norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_graph_capture_advances_the_buffers(channels_last, momentum):
    module = BatchNorm2d(16, momentum=momentum, device="cuda")
    eager = BatchNorm2d(16, momentum=momentum, device="cuda")
    x = torch.randn(4, 16, 20, 20, device="cuda")
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            module(x)
        torch.cuda.current_stream().wait_stream(side)
        module.reset_running_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
        for _ in range(3):
            x.normal_(1.0, 2.0)
            graph.replay()
            expected = eager(x)
            assert torch.equal(y, expected)
        assert module.num_batches_tracked.item() == 3
        assert torch.equal(module.running_mean, eager.running_mean)
        assert torch.equal(module.running_var, eager.running_var)


def test_side_stream():
    """A long kernel before it on the same stream: reading too early would show."""
    x = torch.zeros(8, 16, 128, 128, device="cuda")
    values = torch.randn_like(x)
    expected = batch_norm(values, None, None, training=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(values)
        y = batch_norm(x, None, None, training=True)
        doubled = y * 2
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(y, expected)
    assert torch.equal(doubled, expected * 2)


@pytest.mark.parametrize("shape", [(8, 16, 128, 128), (64, 32, 7, 7)], ids=str)
def test_back_to_back_on_one_stream(shape):
    """Launches overlap the kernel before: each result must be seen, also in memory used again."""
    x = torch.randn(shape, device="cuda")
    y = exact = x
    for _ in range(20):
        y = batch_norm(y * 3 + 1, None, None, training=True)
    torch.cuda.synchronize()
    for _ in range(20):
        exact = batch_norm(exact * 3 + 1, None, None, training=True)
        torch.cuda.synchronize()
    assert torch.equal(y, exact)


def test_nothing_synchronises():
    module = BatchNorm2d(8, momentum=None, device="cuda")
    x = torch.randn(4, 8, 16, 16, device="cuda", requires_grad=True)
    module(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.train()(x).sum().backward()
        module.eval()(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_that_is_not_the_current_one():
    x = torch.randn(4, 8, 16, 16, device="cuda:1")
    with torch.cuda.device(0):
        y = batch_norm(x, None, None, training=True)
    assert y.device == x.device
    torch.testing.assert_close(
        y.cpu(), batch_norm(x.cpu(), None, None, training=True), rtol=1e-5, atol=1e-5
    )


def test_no_gradient_is_dropped_without_no_grad():
    """Nothing asks for a gradient: the autograd wrapper is skipped, and results are the same."""
    module = BatchNorm2d(8, device="cuda").requires_grad_(False)
    x = torch.randn(4, 8, 16, 16, device="cuda")
    y = module(x)
    assert not y.requires_grad
    assert torch.equal(y, module(x.clone().requires_grad_()).detach())


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 2, 23171, 23173), (2**16 + 3, 2**15 + 8, 1, 1)], ids=str)
def test_more_than_2_to_the_31_elements(shape, channels_last):
    x = torch.empty(shape, device="cuda", dtype=torch.float16)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    x.normal_(3.0, 2.0).requires_grad_()
    assert x.numel() > 2**31
    y = batch_norm(x, None, None, training=True)
    dims = (0, 2, 3)
    for part in (slice(0, 1), slice(-1, None)):  # the last channel lies beyond 2^31 elements too
        exact = oracle.batch_norm(x[:, part].detach())
        oracle.assert_y_keeps_contract(y[:, part].detach(), exact)
    y.backward(torch.ones((), device="cuda", dtype=torch.float16).expand_as(y))
    # The gradient of sum(y) is zero.
    assert x.grad[:, -1:].abs().amax(dims).item() < 1e-3
