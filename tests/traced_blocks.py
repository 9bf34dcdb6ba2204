"""Forwards of blocks: such as convert(trace=True) fuses, and such where that would be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE = (4, 3, 6, 6)
FLAG = True
LAYER = nn.ReLU()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(3)
        self.conv2 = nn.Conv2d(3, 3, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.identity = nn.Identity()
        self.flag, self.factor = True, 2.0
        self.cache: list[Tensor] = []
        self.count = 0

    def method(self, x: Tensor) -> Tensor:
        return self.relu(self.bn1(x)) * self.doubled

    @property
    def doubled(self) -> float:
        return self.factor * 2

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def block(function: Callable[[Block, Tensor], Tensor]) -> type[Block]:
    """A class with that forward."""
    return type(function.__name__, (Block,), {"forward": function, "__module__": __name__})


def functional_relu(self, x):
    return F.relu(self.bn1(x), inplace=True)


def functional_others(self, x):
    return F.leaky_relu(self.bn1(F.silu(self.bn2(x)))) + F.gelu(self.downsample[1](x))


def torch_relu(self, x):
    return torch.relu(self.bn1(x)) + self.bn2(x).relu_()


def out_of_place(self, x):
    return self.relu(self.bn1(self.conv1(x)) + x)


def residual_first(self, x):
    return self.relu(x + self.bn1(self.conv1(x)))


def function_add(self, x):
    return self.relu(torch.add(self.bn1(self.conv1(x)), x))


def method_add(self, x):
    return self.relu(self.bn1(self.conv1(x)).add_(x))


def no_activation(self, x):
    return self.bn1(self.conv1(x)) + x


def through_identity(self, x):
    return self.relu(self.identity(self.identity(self.bn1(x)) + x))


def through_a_function(self, x):
    return helper(self, self.conv1(x))


def helper(module, x):
    return module.relu(module.bn1(x)) if module.flag else x


def through_a_method(self, x):
    return self.method(self.conv1(x))


def own_input(self, x):
    return self.relu(self.bn1(x) + x)


def math_and_attributes(self, x):
    return self.relu(self.bn1(x)) * (self.factor * math.pi if self.flag else 1.0)


def by_mode(self, x):
    return self.relu(self.bn1(x)) if self.training else self.bn1(x)


def asks_for_scripting(self, x):
    out = self.bn1(x)
    return out if torch.jit.is_scripting() else self.relu(out)


FUSED = {
    functional_relu: 1,
    torch_relu: 2,
    out_of_place: 1,
    residual_first: 1,
    function_add: 1,
    method_add: 1,
    no_activation: 1,
    through_identity: 1,
    through_a_function: 1,
    through_a_method: 1,
    own_input: 1,
    math_and_attributes: 1,
    by_mode: 1,
    asks_for_scripting: 1,
}


def two_users(self, x):
    out = self.bn1(x)
    return self.relu(out) + out


def depends_on_its_output(self, x):
    out = self.bn1(x)
    return self.relu(out + self.conv1(out))


def added_to_itself(self, x):
    out = self.bn1(x)
    return self.relu(out + out)


def into_the_residual(self, x):
    identity = self.conv2(x)
    identity += self.bn1(self.conv1(x))
    return self.relu(identity + x)


def scaled_add(self, x):
    return self.relu(torch.add(self.bn1(x), x, alpha=2))


def residual_changes(self, x):
    y, residual = x * 1, x * 2
    out = self.bn1(y)
    residual.mul_(3)
    return self.relu(out + residual)


def no_grad(self, x):
    with torch.no_grad():
        out = self.bn1(x)
    return self.relu(out + x)


def sets_a_mode(self, x):
    torch.set_grad_enabled(False)
    out = self.bn1(x)
    torch.set_grad_enabled(True)
    return self.relu(out + x)


def autocast(self, x):
    out = self.bn1(x)
    with torch.autocast("cpu", torch.bfloat16):
        return self.relu(out + self.conv1(x))


def called_twice(self, x):
    return self.relu(self.bn1(x)) + self.relu(self.bn1(x * 2))


def other_slope(self, x):
    return F.leaky_relu(self.bn1(x), 0.3)


def other_gelu(self, x):
    return F.gelu(self.bn1(x), approximate="tanh")


def dropout_between(self, x):
    return self.relu(F.dropout(self.bn1(x), 0.0, self.training))


def branches_on_its_input(self, x):
    return self.relu(self.bn1(x)) if x.sum() > 0 else x


def asks_for_a_class(self, x):
    return self.relu(self.bn1(x if isinstance(x, Tensor) else x[0]))


def reads_a_global(self, x):
    return self.relu(self.bn1(x)) if FLAG else x


def calls_a_global(self, x):
    return LAYER(self.bn1(x))


def counts(self, x):
    self.count += 1
    return self.relu(self.bn1(x))


def remembers(self, x):
    self.cache.append(x)
    return self.relu(self.bn1(x))


def draws(self, x):
    return self.relu(self.bn1(x)) if torch.rand(1) < 2 else x


def makes_a_tensor(self, x):
    return self.relu(self.bn1(x)) + torch.ones(1)


def asks_for_a_mode(self, x):
    return self.relu(self.bn1(x)) if torch.is_grad_enabled() else self.bn1(x)


def reads_a_child(self, x):
    return self.relu(self.bn1(x)) if self.conv1.stride == (1, 1) else x


def optional_argument(self, x, mask=None):
    out = self.relu(self.bn1(x))
    return out if mask is None else out * mask


def checkpoints(self, x):
    return torch.utils.checkpoint.checkpoint(
        lambda t: self.relu(self.bn1(t)), x, use_reentrant=False
    )


NOT_FUSED = [
    two_users,
    depends_on_its_output,
    added_to_itself,
    into_the_residual,
    scaled_add,
    residual_changes,
    no_grad,
    sets_a_mode,
    autocast,
    called_twice,
    other_slope,
    other_gelu,
    dropout_between,
    branches_on_its_input,
    asks_for_a_class,
    reads_a_global,
    calls_a_global,
    counts,
    remembers,
    draws,
    makes_a_tensor,
    asks_for_a_mode,
    reads_a_child,
    optional_argument,
    checkpoints,
]
