"""Mistakes in a call: torch's exceptions, which name what is wrong, and nothing has changed."""

from __future__ import annotations

import pytest
import torch
from linear_cases import Case, make_layer

from cutlass_bn import BatchNorm2d, LinearBatchNorm1d
from cutlass_bn.functional import batch_norm, linear_batch_norm


def _state(tensors) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


MISTAKES = {
    "three dimensions": (lambda x: x[0], ValueError, "expected 4D input \\(got 3D input\\)"),
    "one value per channel": (
        lambda x: x[:1, :, :1, :1],
        ValueError,
        "Expected more than 1 value per channel",
    ),
    "another number of channels": (
        lambda x: x[:, :3],
        RuntimeError,
        r"^input: expected shape \[2, 4, 5, 5\], 4 like running_mean, got \[2, 3, 5, 5\]",
    ),
    "another device": (
        lambda x: x.to("meta"),
        RuntimeError,
        "^input: expected a tensor on .* like running_mean",
    ),
    "integers": (lambda x: x.long(), NotImplementedError, "not implemented"),
    "complex numbers": (lambda x: x.to(torch.complex64), NotImplementedError, "not implemented"),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), NotImplementedError, "not implemented"),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_with_the_module_change_nothing(mistake, training, device):
    change, error, message = MISTAKES[mistake]
    module, x = BatchNorm2d(4).to(device).train(training), torch.randn(2, 4, 5, 5, device=device)
    if mistake == "one value per channel" and not training:
        assert module(change(x)).shape == (1, 4, 1, 1)
        return
    before = _state(module.buffers())
    with pytest.raises(error, match=message):
        module(change(x))
    assert all(map(torch.equal, module.buffers(), before))


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_another_device_changes_nothing(name, device):
    x, elsewhere = torch.randn(2, 4, 5, 5, device=device), "meta" if device == "cpu" else "cpu"
    vectors = {
        v: torch.ones(4, device=device) for v in ("running_mean", "running_var", "weight", "bias")
    }
    before = _state(vectors.values())
    with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor on {device}.* like"):
        batch_norm(x, **{**vectors, name: vectors[name].to(elsewhere)}, training=True)
    assert all(map(torch.equal, vectors.values(), before))


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_a_vector_of_another_size_changes_nothing(name, device):
    x = torch.randn(2, 4, 5, 5, device=device)
    vectors = {
        v: torch.ones(4, device=device) for v in ("running_mean", "running_var", "weight", "bias")
    }
    before = _state(vectors.values())
    for wrong in (torch.ones(5, device=device), torch.ones(1, 4, device=device)):
        with pytest.raises(RuntimeError, match=rf"^{name}: expected shape \[4\]"):
            batch_norm(x, **{**vectors, name: wrong}, training=True)
    assert all(map(torch.equal, vectors.values(), before))


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_with_one_vector_it_is_the_input(training, device):
    x, weight = torch.randn(2, 3, 5, 5, device=device), torch.ones(4, device=device)
    statistics = (None, None) if training else (weight, weight)
    with pytest.raises(RuntimeError, match=r"^input: expected shape \[2, 4, 5, 5\], 4 like"):
        batch_norm(x, *statistics, weight, training=training)


LINEAR_MISTAKES = {
    "eps 0": ({"eps": 0.0}, ValueError, "eps"),
    "eps below 0 in eval": ({"eps": -1.0, "training": False}, ValueError, "eps"),
    "integers": (
        {"input": torch.int64, "weight": torch.int64, "bias": torch.int64},
        NotImplementedError,
        "floating",
    ),
    "complex numbers": (
        dict.fromkeys(("input", "weight", "bias"), torch.complex64),
        NotImplementedError,
        "floating",
    ),
}
# One argument that doesn't fit the others, and what is said.
MISFITS = {
    "scale elsewhere": ("scale", "elsewhere", "expected a tensor on .* like weight"),
    "beta elsewhere": ("beta", "elsewhere", "expected a tensor on .* like weight"),
    "running_var elsewhere": ("running_var", "elsewhere", "expected a tensor on .* like weight"),
    "weight elsewhere": ("weight", "elsewhere", "expected a tensor on .* like bias"),
    "input elsewhere": ("input", "elsewhere", "expected a tensor on .* like weight"),
    "input's dtype": ("input", torch.float16, "expected torch.float32 like weight"),
    "weight's dtype": ("weight", torch.float16, "expected torch.float32 like bias"),
    "bias's dtype": ("bias", torch.float16, "expected torch.float32 like weight"),
    "input's features": ("input", lambda x: x[:, 1:], r"expected shape \[M, 8\] like weight"),
    "weight's rank": ("weight", lambda w: w[0], r"expected shape \[N, 8\]"),
    "weight's rows": ("weight", lambda w: w[1:], r"expected shape \[8, 8\], 8 like bias"),
    "scale's size": ("scale", lambda s: s[1:], r"expected shape \[8\] like weight"),
    "gamma's rank": ("gamma", lambda g: g[None], r"expected shape \[8\], got \[1, 8\]"),
}
LINEAR_MISTAKES |= {
    key: ({name: change}, RuntimeError, f"^{name}: {text}")
    for key, (name, change, text) in MISFITS.items()
}


@pytest.mark.parametrize("mistake", LINEAR_MISTAKES)
def test_mistakes_with_the_linear_layer_change_nothing(mistake, device):
    changes, error, message = LINEAR_MISTAKES[mistake]
    layer = make_layer(Case(6, 8, 8, "valid before the mistake"), device)
    before, arguments = layer.clone(), {"training": True, **layer.arguments()}
    for name, change in changes.items():
        if change == "elsewhere":
            change = "meta" if device == "cpu" else "cpu"
        if callable(change):
            arguments[name] = change(arguments[name])
        elif isinstance(change, float | bool):
            arguments[name] = change
        else:
            arguments[name] = arguments[name].to(change)
    with pytest.raises(error, match=message):
        linear_batch_norm(**arguments)
    assert torch.equal(layer.running_mean, before.running_mean)
    assert torch.equal(layer.running_var, before.running_var)
    assert layer.num_batches_tracked == 0


# What the caller of a module passed is the input, and the message is about nothing else.
INPUTS = {
    "features": (lambda x: x[:, 1:], r"input: expected shape \[6, 5\], 5 features, got \[6, 4\]"),
    "one row": (lambda x: x[0, 1:], r"input: expected shape \[5\], 5 features, got \[4\]"),
    "three dimensions, features": (
        lambda x: x.expand(2, 6, 5)[..., 1:],
        r"input: expected shape \[2, 6, 5\], 5 features, got \[2, 6, 4\]",
    ),
    "three dimensions, channels": (
        lambda x: x.expand(2, 6, 5),
        r"input: expected shape \[M, 8, 5\], got \[2, 6, 5\]: of three dimensions .* is 8 channels",
    ),
    "one dimension": (lambda x: x[0], r"expected 2D or 3D input \(got 1D input\)"),
    "half": (lambda x: x.half(), "input: expected torch.float32 like weight, got .*float16"),
    "double": (lambda x: x.double(), "input: expected torch.float32 like weight, got .*float64"),
    "integers": (lambda x: x.long(), "input: expected a floating-point tensor, got torch.int64"),
    "device": (lambda x: x.to("meta"), "input: expected a tensor on .* like weight, got .* meta"),
}
ERRORS = {"one dimension": ValueError, "integers": NotImplementedError}


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "all parts"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("mistake", INPUTS)
def test_inputs_of_the_linear_module(mistake, training, bare, device):
    change, message = INPUTS[mistake]
    module = LinearBatchNorm1d(5, 8, bias=not bare, scale=not bare, affine=not bare, device=device)
    before = _state(module.train(training).buffers())
    with pytest.raises(ERRORS.get(mistake, RuntimeError), match=f"^{message}$"):
        module(change(torch.randn(6, 5, device=device)))
    assert all(map(torch.equal, module.buffers(), before))
