"""BatchNorm1d, 2d and 3d with an activation and a residual: as torch's modules one by one."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import cutlass_bn

CLASSES = {
    "BatchNorm1d": [(6, 4), (3, 4, 5)],
    "BatchNorm2d": [(3, 4, 5, 6)],
    "BatchNorm3d": [(2, 4, 3, 4, 5)],
}
SHAPES = [(name, shape) for name, shapes in CLASSES.items() for shape in shapes]
ACTIVATIONS = {
    None: nn.Identity(),
    "relu": nn.ReLU(),
    "leaky_relu": nn.LeakyReLU(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
}


def pair(name: str, device: str = "cpu", **options) -> tuple[nn.Module, nn.Module]:
    ours = getattr(cutlass_bn, name)(4, **options).to(device)
    options.pop("activation", None)
    theirs = getattr(nn, name)(4, **options).to(device)
    if theirs.affine:
        nn.init.uniform_(theirs.weight, 0.5, 2.0)
        nn.init.uniform_(theirs.bias)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=str)
def test_is_torchs_chain(name, shape, activation, with_residual, training, device):
    ours, theirs = pair(name, device, activation=activation)
    x, residual, weights = (torch.randn(shape, device=device) for _ in range(3))
    results = []
    for module in (ours, theirs):
        module.train(training)
        inputs = [x.clone().requires_grad_()]
        if with_residual:
            inputs.append(residual.clone().requires_grad_())
        if module is ours:
            y = ours(*inputs)
        else:
            y = theirs(inputs[0])
            y = ACTIVATIONS[activation](y + inputs[1] if with_residual else y)
        parameters = list(module.parameters())
        gradients = torch.autograd.grad((y * weights).sum(), [*inputs, *parameters])
        results.append((y, *gradients, *module.buffers()))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_takes_torchs_arguments_in_their_order(name):
    ours = inspect.signature(getattr(cutlass_bn, name)).parameters
    theirs = inspect.signature(getattr(nn, name)).parameters
    assert list(ours.values())[:-1] == list(theirs.values())
    assert list(ours)[-1] == "activation"
    if "bias" in theirs:
        assert getattr(cutlass_bn, name)(4, bias=False).bias is None
    with pytest.raises(TypeError, match="colour"):
        getattr(cutlass_bn, name)(4, colour="red")


@pytest.mark.parametrize("name", CLASSES)
def test_is_a_drop_in(name):
    ours, theirs = pair(name)
    assert isinstance(ours, getattr(nn, name))
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert vars(ours).keys() - {"__module__"} == vars(theirs).keys()
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("name", CLASSES)
def test_refuses_other_ranks_as_torch_does(name):
    ours, theirs = pair(name)
    for rank in range(1, 7):
        x = torch.randn(4, 4, 2, 2, 2, 2)[(..., *[0] * (6 - rank))]
        if list(x.shape) in [[4, 4, 2, 2, 2][: len(shape)] for shape in CLASSES[name]]:
            ours(x)
            continue
        with pytest.raises(ValueError) as theirs_raised:  # noqa: PT011
            theirs(x)
        with pytest.raises(ValueError) as ours_raised:  # noqa: PT011
            ours(x)
        assert str(ours_raised.value) == str(theirs_raised.value)


def test_activation_is_a_live_attribute():
    ours, theirs = pair("BatchNorm2d")
    x = torch.randn(3, 4, 5, 6)
    for activation, layer in ACTIVATIONS.items():
        ours.activation = activation
        assert_close(ours(x), layer(theirs(x)))
    assert "activation='silu'" in repr(ours)
    ours.activation = "tanh"
    with pytest.raises(ValueError, match="activation: expected None, 'relu'"):
        ours(x)
    with pytest.raises(ValueError, match="activation: expected None, 'relu'"):
        cutlass_bn.BatchNorm2d(4, activation="tanh")


def test_copies_and_pickles():
    module = cutlass_bn.BatchNorm2d(4, activation="silu")
    x = torch.randn(3, 4, 5, 6)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.activation == "silu"
        assert_close(other(x), copy.deepcopy(module)(x))
    del (state := module.__dict__.copy())["activation"]
    older = cutlass_bn.BatchNorm2d.__new__(cutlass_bn.BatchNorm2d)
    older.__setstate__(state)
    assert older.activation is None


WRONG_RESIDUALS = {
    "shape": torch.randn(3, 4, 5, 1),
    "dtype": torch.randn(3, 4, 5, 6).bfloat16(),
    "device": torch.randn(3, 4, 5, 6, device="meta"),
}


@pytest.mark.parametrize("wrong", WRONG_RESIDUALS)
def test_refuses_a_residual_by_name(wrong):
    module = cutlass_bn.BatchNorm2d(4)
    with pytest.raises(RuntimeError, match="residual"):
        module(torch.randn(3, 4, 5, 6), WRONG_RESIDUALS[wrong])
    assert module.num_batches_tracked == 0


def test_residual_under_autocast():
    module = cutlass_bn.BatchNorm2d(4, activation="relu").eval()
    x, residual = torch.randn(3, 4, 5, 6).bfloat16(), torch.randn(3, 4, 5, 6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, residual)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert residual.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_state_outside_the_dicts(name):
    """As in DataParallel's replicas, parametrised and partly pruned modules."""
    ours, theirs = pair("BatchNorm2d", activation="relu")
    tensor = getattr(ours, name).detach().clone()
    delattr(ours, name)
    setattr(ours, name, tensor)
    x = torch.randn(3, 4, 5, 6)
    assert_close(ours(x), theirs(x).relu())


def test_parametrised():
    ours, theirs = pair("BatchNorm2d", activation="relu")
    for module in (ours, theirs):
        nn.utils.parametrize.register_parametrization(module, "weight", nn.Softplus())
    x = torch.randn(3, 4, 5, 6)
    assert_close(ours(x), theirs(x).relu())
