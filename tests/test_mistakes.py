"""Mistakes in a call: torch's exceptions, and nothing has changed afterwards. On the CPU and on CUDA."""

from __future__ import annotations

import pytest
import torch
from linear_cases import Case, make_layer

from cutlass_bn import BatchNorm2d
from cutlass_bn.functional import batch_norm, linear_batch_norm


def _state(tensors) -> list[torch.Tensor]:
    return [t.clone() for t in tensors]


MISTAKES = {
    "three dimensions": (lambda x: x[0], ValueError, "expected 4D input \\(got 3D input\\)"),
    "one value per channel": (lambda x: x[:1, :, :1, :1], ValueError, "Expected more than 1 value per channel"),
    "another number of channels": (lambda x: x[:, :3], RuntimeError, "4|3"),
    "integers": (lambda x: x.long(), NotImplementedError, "not implemented"),
    "complex numbers": (lambda x: x.to(torch.complex64), NotImplementedError, "not implemented"),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), NotImplementedError, "not implemented"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_with_the_module_change_nothing(mistake, device):
    change, error, message = MISTAKES[mistake]
    module, x = BatchNorm2d(4).to(device), torch.randn(2, 4, 5, 5, device=device)
    before = _state(module.buffers())
    with pytest.raises(error, match=message):
        module(change(x))
    assert all(map(torch.equal, module.buffers(), before))


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_another_device_changes_nothing(name, device):
    x, elsewhere = torch.randn(2, 4, 5, 5, device=device), "meta" if device == "cpu" else "cpu"
    vectors = {v: torch.ones(4, device=device) for v in ("running_mean", "running_var", "weight", "bias")}
    before = _state(vectors.values())
    with pytest.raises(RuntimeError, match=name):
        batch_norm(x, **{**vectors, name: vectors[name].to(elsewhere)}, training=True)
    assert all(map(torch.equal, vectors.values(), before))


@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_a_vector_of_another_size_changes_nothing(name, device):
    """On CUDA two ops run in training: the first must not have counted the batch when the second one objects."""
    x = torch.randn(2, 4, 5, 5, device=device)
    vectors = {v: torch.ones(4, device=device) for v in ("running_mean", "running_var", "weight", "bias")}
    before = _state(vectors.values())
    with pytest.raises(RuntimeError, match=name):
        batch_norm(x, **{**vectors, name: torch.ones(5, device=device)}, training=True)
    assert all(map(torch.equal, vectors.values(), before))


LINEAR_MISTAKES = {
    "eps 0": ({"eps": 0.0}, ValueError, "eps"),
    "eps below 0 in eval": ({"eps": -1.0, "training": False}, ValueError, "eps"),
    "integers": ({"input": torch.int64, "weight": torch.int64, "bias": torch.int64}, NotImplementedError, "floating"),
    "complex numbers": (dict.fromkeys(("input", "weight", "bias"), torch.complex64), NotImplementedError, "floating"),
    "scale elsewhere": ({"scale": "elsewhere"}, RuntimeError, "scale: expected a tensor on"),
    "beta elsewhere": ({"beta": "elsewhere"}, RuntimeError, "beta: expected a tensor on"),
    "running_var elsewhere": ({"running_var": "elsewhere"}, RuntimeError, "running_var: expected a tensor on"),
}


@pytest.mark.parametrize("mistake", LINEAR_MISTAKES)
def test_mistakes_with_the_linear_layer_change_nothing(mistake, device):
    changes, error, message = LINEAR_MISTAKES[mistake]
    layer = make_layer(Case(6, 8, 8, "valid before the mistake"), device)
    before, arguments = layer.clone(), {"training": True, **layer.arguments()}
    for name, change in changes.items():
        if change == "elsewhere":
            change = "meta" if device == "cpu" else "cpu"
        arguments[name] = change if isinstance(change, float | bool) else arguments[name].to(change)
    with pytest.raises(error, match=message):
        linear_batch_norm(**arguments)
    assert torch.equal(layer.running_mean, before.running_mean)
    assert torch.equal(layer.running_var, before.running_var)
    assert layer.num_batches_tracked == 0
