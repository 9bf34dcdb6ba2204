"""BatchNorm on chip (csrc/batch_norm/on_chip/plan.h): when, and what shared cases don't show."""

from concurrent.futures import ThreadPoolExecutor

import oracle
import pytest
import torch
from torch import Tensor

from cutlass_bn import BatchNorm2d, explain
from cutlass_bn.functional import batch_norm
from cutlass_bn.ops import batch_norm as ops

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def gradients(x: Tensor, grad: Tensor, weight: Tensor, function=batch_norm) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    bias = torch.zeros_like(weight).requires_grad_()
    y = function(leaves[0], None, None, leaves[1], bias, True)
    return list(torch.autograd.grad(y, [*leaves, bias], grad))


def is_on_chip(x: Tensor, backward: bool) -> bool:
    return ops.batch_norm_plan(x, backward)[0] > 0


def assert_right(x: Tensor) -> None:
    """y and the gradients against float64, on the device."""
    weight = torch.rand(x.size(1), device="cuda") + 0.5
    grad = torch.randn_like(x)
    oracle.poison("cuda", x.numel())
    exact = oracle.batch_norm(x, weight, torch.zeros_like(weight))
    oracle.assert_y_keeps_contract(
        batch_norm(x, None, None, weight, torch.zeros_like(weight), True), exact, weight
    )
    wide = gradients(x.double(), grad.double(), weight.double(), torch.nn.functional.batch_norm)
    peers = gradients(x, grad, weight, torch.nn.functional.batch_norm)
    for actual, reference, peer in zip(gradients(x, grad, weight), wide, peers, strict=True):
        oracle.assert_no_worse(actual, reference, peer)


@pytest.mark.parametrize(
    ("sizes", "dtype", "forward", "backward"),
    [
        ((8, 64, 32, 32), F32, "on chip", "on chip"),
        ((64, 256, 56, 56), F32, "on chip", "on chip"),
        ((128, 512, 28, 28), BF16, "on chip", "on chip"),
        ((16, 64, 256, 256), F32, "on chip", "on chip"),
        ((64, 4, 256, 256), F32, "two passes", "two passes"),  # 16 MiB a channel
        ((48, 4, 256, 256), F16, "on chip", "two passes"),  # 6 MiB, which are 12 with the gradient
        ((8, 64, 16, 16), F32, "two passes", "two passes"),  # small planes
        ((8, 64, 17, 18), F32, "two passes", "two passes"),  # planes that are no whole vectors
    ],
    ids=str,
)
def test_plan(sizes, dtype, forward, backward):
    x = torch.empty(sizes, dtype=dtype, device="cuda")
    assert is_on_chip(x, False) == (forward == "on chip")
    assert is_on_chip(x, True) == (backward == "on chip")
    parts = [
        name for name, plan in (("forward", forward), ("backward", backward)) if plan == "on chip"
    ]
    expected = "NCHW" + (", on chip " + " and ".join(parts) if parts else "")
    module = BatchNorm2d(sizes[1], device="cuda")
    assert explain(module, x).tile == expected
    assert explain(module.eval(), x).tile == "NCHW"
    assert not is_on_chip(x.to(memory_format=torch.channels_last), False)


def details(x: Tensor, backward: bool) -> dict[str, int]:
    """Of a plan, and the rounds in which the channels are worked on."""
    names = ("blocks a channel", "channels at a time", "chunks a warp", "channels ahead")
    plan = dict(zip(names, ops.batch_norm_plan(x, backward), strict=True))
    plan["rounds"] = -(-x.size(1) // plan["channels at a time"])
    return plan


def test_plan_of_unaligned_memory():
    storage = torch.empty(8 * 64 * 32 * 32 + 1, device="cuda")
    assert not is_on_chip(storage[1:].view(8, 64, 32, 32), False)
    assert not is_on_chip(storage[:0].view(0, 64, 32, 32), False)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        (64, 2, 256, 260),  # in two passes in float32
        (37, 19, 52, 60),
        (130, 3, 100, 96),
        (3, 700, 24, 24),
        (256, 5, 28, 28),
        (2, 2, 512, 512),
        (64, 256, 56, 56),
        (128, 512, 28, 28),
    ],
    ids=str,
)
def test_against_float64(sizes, dtype):
    assert_right(torch.randn(sizes, device="cuda").mul_(2.0).add_(3.0).to(dtype))


def test_shapes_above_cover_the_ring():
    """Blocks that exchange while barriers change phase, several chunks a warp: as in use."""
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the plans are those of 132 multiprocessors")
    for dtype, sizes in ((F32, (64, 256, 56, 56)), (BF16, (128, 512, 28, 28))):
        for backward in (False, True):
            plan = details(torch.empty(sizes, dtype=dtype, device="cuda"), backward)
            assert plan["blocks a channel"] > 1, plan
            assert plan["rounds"] > 2 * (plan["channels ahead"] + 1), plan
            assert plan["chunks a warp"] > 1 or (dtype == F32 and backward), plan


OUTLIERS = {
    # Where a warp's sums are taken around a first value that is far from the rest.
    "a plane's first rows": ((64, 64, 64, 64), lambda x: x[:, :, :3]),
    "a channel's first values": ((16, 200, 256, 256), lambda x: x[:1].flatten(2)[:, :, :128]),
    "a plane's last values, a piece of one vector": (
        (8, 200, 12, 5419),
        lambda x: x.flatten(2)[:, :, -4:],
    ),
    "a plane's last row": ((4, 64, 452, 452), lambda x: x[:, :, -1:]),
    "every other sample": ((64, 64, 56, 56), lambda x: x[::2]),
}


@pytest.mark.parametrize("value", [0.0, 1000.0])
@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.01), (777.7, 1.0)])
@pytest.mark.parametrize("where", OUTLIERS)
def test_values_unlike_the_rest(where, mean, std, value):
    sizes, select = OUTLIERS[where]
    x = torch.randn(sizes, device="cuda").mul_(std).add_(mean)
    select(x).fill_(value)
    assert is_on_chip(x, False)
    exact = oracle.batch_norm(x)
    oracle.assert_y_keeps_contract(batch_norm(x, None, None, training=True), exact)
    var = torch.zeros(sizes[1], device="cuda")
    batch_norm(x, torch.zeros_like(var), var, training=True, momentum=1.0)
    torch.testing.assert_close(var.double(), exact.unbiased, rtol=1e-6, atol=0.0)


def test_constant_channels():
    values = torch.tensor([0.0, 1.0, -3.7, 1e-30, 65000.0, 3e38], device="cuda")
    x = values.view(1, 6, 1, 1).expand(24, 6, 48, 52).contiguous()
    bias = torch.randn(6, device="cuda")
    var = torch.full((6,), 5.0, device="cuda")
    mean = torch.zeros(6, device="cuda")
    y = batch_norm(x, mean, var, None, bias, True, momentum=1.0)
    assert torch.equal(y, bias.view(1, 6, 1, 1).expand_as(y))
    assert torch.equal(var, torch.zeros_like(var))
    assert torch.equal(mean, values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_non_finite_values_stay_in_their_channel(bad):
    x = torch.randn(24, 6, 48, 52, device="cuda")
    clean = batch_norm(x, None, None, training=True)
    x[17, 2, 30, 5] = bad
    y = batch_norm(x, None, None, training=True)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[:, others], clean[:, others])
    assert y[:, 2].isnan().all()


@pytest.mark.parametrize("sizes", [(24, 6, 48, 52), (4, 300, 20, 20), (40, 1, 128, 128)], ids=str)
def test_agrees_with_two_passes(sizes):
    """The same values where bulk copies can't take them."""
    x, grad = torch.randn(sizes, device="cuda"), torch.randn(sizes, device="cuda")
    weight = torch.rand(sizes[1], device="cuda") + 0.5
    unaligned = torch.empty(x.numel() + 1, device="cuda")[1:].view(sizes).copy_(x)
    assert is_on_chip(x, True)
    assert not is_on_chip(unaligned, True)
    for actual, expected in zip(
        gradients(x, grad, weight), gradients(unaligned, grad, weight), strict=True
    ):
        torch.testing.assert_close(
            actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item()
        )
    y = [batch_norm(t, None, None, weight, None, True) for t in (x, unaligned)]
    torch.testing.assert_close(*y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_graph_of_blocks_that_wait_for_each_other(momentum):
    x = torch.randn(24, 6, 48, 52, device="cuda")
    assert details(x, False)["blocks a channel"] > 1
    module, eager = (BatchNorm2d(6, momentum=momentum, device="cuda") for _ in range(2))

    def step(module: BatchNorm2d) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = module(leaf)
        return y.detach(), *torch.autograd.grad(
            y.square().sum() + y.sum(), [leaf, module.weight, module.bias]
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(module)
    torch.cuda.current_stream().wait_stream(side)
    module.reset_running_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(module)
    for _ in range(3):
        x.normal_(1.0, 2.0)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(eager), strict=True))
    assert module.num_batches_tracked.item() == 3
    assert torch.equal(module.running_var, eager.running_var)


def test_many_streams_at_once():
    """Kernels whose blocks wait for each other, others in their room: none may wait for ever."""
    inputs = [torch.randn(24, 6, 48, 52, device="cuda") for _ in range(4)]
    matrix = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    expected = [batch_norm(x, None, None, training=True) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in inputs]
    for _ in range(20):
        for x, stream, own in zip(inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                matrix @ matrix
                own.append(batch_norm(x, None, None, training=True))
    torch.cuda.synchronize()
    for own, y in zip(results, expected, strict=True):
        assert all(torch.equal(result, y) for result in own)


def test_plans_that_differ_in_one_graph():
    """Each kernel is launched with as much shared memory as its plan asks for."""
    inputs = [
        torch.randn(sizes, device="cuda")
        for sizes in ((64, 64, 56, 56), (2, 16, 20, 20), (24, 6, 48, 52))
    ]
    expected = [batch_norm(x, None, None, training=True) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [batch_norm(x, None, None, training=True) for x in inputs]
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_plans_that_differ_in_many_threads():
    inputs = [
        torch.randn(sizes, device="cuda")
        for sizes in ((64, 64, 56, 56), (2, 16, 20, 20), (24, 6, 48, 52))
    ]
    expected = [batch_norm(x, None, None, training=True) for x in inputs]

    def run(x: Tensor) -> list[Tensor]:
        return [batch_norm(x, None, None, training=True) for _ in range(50)]

    with ThreadPoolExecutor(len(inputs)) as pool:
        for results, y in zip(pool.map(run, inputs), expected, strict=True):
            assert all(torch.equal(result, y) for result in results)
