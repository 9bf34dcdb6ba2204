"""What the backend must not fuse, and what of it may be fused all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_backend_patterns import Model, Recorder, check, images
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def sum_used_elsewhere(m: Model, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = m.bn(x) + r
    return F.relu(y), y


def residual_of_output(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    return F.relu(y + y.mean())


def doubled_in_place(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    y += y
    return F.relu(y)


def added_to_residual(m: Model, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    s = r
    s += m.bn(x)
    return F.relu(s), r


def buffers_read_between(m: Model, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = m.bn(x)
    return F.relu(y + r * m.bn.running_mean.mean()), m.bn.running_var * 1


def output_seen_through_view(m: Model, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = m.bn(x)
    return F.relu(y), y.flatten()


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, r: m.bn(x),
        lambda m, x, r: m.bn(x) + r,
        lambda m, x, r: (F.relu(y := m.bn(x)), y),
        sum_used_elsewhere,
        residual_of_output,
        doubled_in_place,
        added_to_residual,
        buffers_read_between,
        output_seen_through_view,
        lambda m, x, r: F.relu(m.bn(x) + r[:1]),
        lambda m, x, r: F.relu(m.bn(x) + 1.0),
        lambda m, x, r: F.relu(torch.add(m.bn(x), r, alpha=2)),
        lambda m, x, r: F.leaky_relu(m.bn(x), 0.3),
        lambda m, x, r: F.leaky_relu(m.bn(x), negative_slope=0.2, inplace=True),
        lambda m, x, r: F.gelu(m.bn(x), approximate="tanh"),
        lambda m, x, r: F.relu(F.hardtanh(m.bn(x))),
        lambda m, x, r: F.prelu(m.bn(x), m.scale),
        lambda m, x, r: F.relu(F.instance_norm(x)),
        lambda m, x, r: F.relu(x),
    ],
)
def test_left_alone(function):
    check(Model(function), images(), [])


def residual_changed_behind_the_sum(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x) + r
    r.mul_(2)
    return F.relu(y)


def residual_set_between(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    r[0] = 0.0
    return F.relu(y + r)


def input_changed_between(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    x.add_(r)
    return F.relu(y)


def view_of_input_changed_between(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    x.view(-1)[3:].add_(1.0)
    return F.relu(y)


def weight_changed_between(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    m.bn.weight.mul_(2.0)
    return F.relu(y)


def written_by_out(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    torch.add(r, 1.0, out=x)
    return F.relu(y)


def buffers_changed_between(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(x)
    m.bn.running_var.mul_(2.0)
    return F.relu(y)


@pytest.mark.parametrize(
    "function",
    [
        residual_changed_behind_the_sum,
        residual_set_between,
        input_changed_between,
        view_of_input_changed_between,
        weight_changed_between,
        written_by_out,
        buffers_changed_between,
    ],
)
@torch.no_grad()
def test_changes_between(function):
    check(Model(function), images(), [])


@torch.no_grad()
def test_unrelated_changes_between():
    def function(m: Model, x: Tensor, r: Tensor) -> Tensor:
        y = m.bn(x)
        r.mul_(2)
        return F.relu(y + r)

    check(Model(function), images(), ["bn add relu"])


def test_shared_norm():
    """Its statistics take the batches in the order of the calls, the first of which stays there."""

    def function(m: Model, x: Tensor, r: Tensor) -> Tensor:
        a = m.bn(x)
        b = m.bn(r)
        return F.relu(a) + F.relu(b)

    check(Model(function), images(), ["bn", "bn relu"])


def border(context: Callable[[], Any]) -> Callable[..., Any]:
    def function(m: Model, x: Tensor, r: Tensor) -> Tensor:
        with context():
            y = m.bn(x)
        return F.relu(y)

    return function


BORDERS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", BORDERS)
def test_borders(name):
    check(Model(border(BORDERS[name])), images(), [])


def test_part_before_a_border():
    """Of a chain that a border cuts, what is on one side."""

    def between_norm_and_activation(m: Model, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = m.bn1d(m.linear(x))
        return F.relu(y)

    def between_linear_and_norm(m: Model, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            z = m.linear(x)
        return F.relu(m.bn1d(z))

    x = torch.randn(9, 6)
    for function, expected in (
        (between_norm_and_activation, ["linear bn"]),
        (between_linear_and_norm, ["bn relu"]),
    ):
        recorder, model = Recorder(), Model(function)
        torch.compiler.reset()
        actual = torch.compile(model, backend=recorder, fullgraph=True)(x)
        assert recorder.calls == expected
        torch.testing.assert_close(actual, model(x))


@pytest.mark.parametrize("name", BORDERS)
def test_within_borders(name):
    def function(m: Model, x: Tensor, r: Tensor) -> Tensor:
        with BORDERS[name]():
            y = F.relu(m.bn(x) + r)
        return y + m.convolution(x)

    check(Model(function), images(), ["bn add relu"])


def autocast_sum(m: Model, x: Tensor, r: Tensor) -> Tensor:
    return F.relu(m.bn(m.convolution(x)) + r)


def autocast_sum_in_place(m: Model, x: Tensor, r: Tensor) -> Tensor:
    y = m.bn(m.convolution(x))
    y += r
    return F.relu(y)


@pytest.mark.parametrize(
    ("function", "fused"),
    [
        (autocast_sum, False),
        (autocast_sum_in_place, False),
        (lambda m, x, r: F.relu(m.bn(m.convolution(x)) + m.convolution(r)), True),
    ],
)
def test_dtype_of_the_sum(function, fused):
    """In autocast a convolution gives bfloat16, and the sum with float32 is float32."""
    recorder, model = Recorder(), Model(function)
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.compile(model, backend=recorder, fullgraph=True)(*images())
    assert recorder.calls == ["bn add relu"] * fused
    assert actual.dtype == (torch.float32 if function is autocast_sum else torch.bfloat16)


def test_linear_in_autocast():
    recorder, model = Recorder(), Model(lambda m, x: F.relu(m.bn1d(m.linear(x) * m.scale)))
    torch.compiler.reset()
    x = torch.randn(16, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        actual = torch.compile(model, backend=recorder, fullgraph=True)(x)
    assert recorder.calls == ["linear scale bn relu"]
    torch.testing.assert_close(actual, expected)  # float32, which scale is


def test_float64():
    model = Model(lambda m, x, r: F.relu(m.bn(x))).double()
    check(model, images(torch.float64), [])


def test_checkpointed_blocks():
    """Dynamo has them in graphs of their own."""

    def function(m: Model, x: Tensor, r: Tensor) -> Tensor:
        y = checkpoint(lambda x: F.relu(m.bn(x)), x, use_reentrant=False)
        return F.relu(m.other(y))

    recorder, model = Recorder(), Model(function)
    torch.compiler.reset()
    torch.compile(model, backend=recorder, fullgraph=True)(*images())
    assert recorder.calls == ["bn relu"]


def test_momentum_of_cumulative_average():
    """torch reads the counter, which ends the graph; a momentum is then what the next one takes."""
    model, twin = (nn.Sequential(nn.BatchNorm2d(4, momentum=None), nn.ReLU()) for _ in range(2))
    torch.compiler.reset()
    compiled = torch.compile(twin, backend=Recorder())
    for x in (*images(), *images()):
        torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(twin.state_dict(), model.state_dict())
