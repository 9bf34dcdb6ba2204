"""cutlass_bn.explain: which code runs, as layouts, dtypes and switches call for it."""

from __future__ import annotations

import pytest
import torch
from linear_cases import BF16, FP16, fp32_precision, hopper
from torch import nn

import cutlass_bn
from cutlass_bn import BatchNorm2d, LinearBatchNorm1d, Plan, explain, functional


def test_cpu():
    assert explain(LinearBatchNorm1d(4, 8), torch.ones(3, 4)) == Plan(
        "cpu", "", "the input is on cpu"
    )
    assert explain(BatchNorm2d(4), torch.ones(2, 4, 3, 3)) == Plan("cpu", "", "the input is on cpu")
    assert explain(functional.linear_batch_norm, torch.ones(3, 4), torch.ones(8, 4)).path == "cpu"
    assert explain(functional.batch_norm, torch.ones(3, 4), None, None, training=True).path == "cpu"


def test_names_what_is_not_fused():
    module = LinearBatchNorm1d(4, 8)
    assert explain(module, torch.ones(2, 8, 4)) == Plan(
        "unfused modules", "", "the input has 3 dimensions"
    )
    module.bn = nn.InstanceNorm1d(8)
    assert explain(module, torch.ones(3, 4)) == Plan(
        "unfused modules", "", "bn is a InstanceNorm1d"
    )


def test_takes_the_input_by_name():
    x, image = torch.ones(3, 4), torch.ones(2, 4, 3, 3)
    assert explain(LinearBatchNorm1d(4, 8), input=x).path == "cpu"
    assert explain(BatchNorm2d(4), input=image).path == "cpu"


ATTRIBUTES = {"gemm": "weight", "bn": "bias", "": "scale"}


@pytest.mark.parametrize("child", ATTRIBUTES)
def test_parameters_that_are_attributes(child):
    """As DataParallel and FSDP1 leave them; test_modules_in_models.py has both themselves."""
    module, name = LinearBatchNorm1d(4, 8, scale=True), ATTRIBUTES[child]
    owner = module.get_submodule(child)
    tensor = getattr(owner, name).detach().clone()
    delattr(owner, name)
    setattr(owner, name, tensor)
    plan = explain(module, torch.ones(3, 4))
    assert plan.path == "unfused modules"
    assert plan.reason.startswith(f"{name} of {child}" if child else name)
    assert "DataParallel's replicas and FSDP1" in plan.reason


def test_parameters_that_are_missing():
    module = LinearBatchNorm1d(4, 8)
    del module.gemm.weight
    assert explain(module, torch.ones(3, 4)).reason == "weight of gemm is not a parameter"


def test_changes_nothing():
    module = LinearBatchNorm1d(4, 8)
    explain(module, torch.ones(3, 4))
    assert module.bn.num_batches_tracked == 0
    assert module.training


def test_reads_well():
    assert str(Plan("fused", "large 256x128 tile", "")) == "fused: large 256x128 tile"
    assert str(Plan("portable", "", "odd K")) == "portable: odd K"
    assert str(Plan("fused", "", "")) == "fused"


@pytest.mark.parametrize("target", [nn.Linear(2, 2), torch.relu, LinearBatchNorm1d])
def test_other_targets(target):
    with pytest.raises(TypeError):
        explain(target, torch.ones(2, 2))


def test_missing_arguments():
    with pytest.raises(TypeError):
        explain(functional.linear_batch_norm, torch.ones(2, 2))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tf32", "path"),
    [
        (BF16, False, "fused"),
        (FP16, False, "fused"),
        (torch.float32, True, "fused"),
        (torch.float32, False, "portable"),
        (torch.float64, False, "reference"),
    ],
)
@pytest.mark.parametrize("m", [2, 16, 300, 16384])
def test_path_by_dtype(m, dtype, tf32, path, training):
    """K is so short that exact float32 products are torch.mm's; test_split_layer.py has longer."""
    module = LinearBatchNorm1d(32, 128, device="cuda", dtype=dtype).train(training)
    with fp32_precision(tf32):
        plan = explain(module, torch.ones(m, 32, device="cuda", dtype=dtype))
    assert plan.path == path, plan
    assert bool(plan.tile) == (path == "fused")
    assert bool(plan.reason) == (path != "fused")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    ("x", "path", "reason"),
    [
        (lambda: torch.ones(64, 64), "fused", ""),
        (lambda: torch.ones(64, 72)[:, :64], "fused", ""),
        (lambda: torch.ones(64, 65)[:, :64], "portable", "input"),
        (lambda: torch.ones(64 * 64 + 1)[1:].view(64, 64), "portable", "input"),
        (lambda: torch.ones(64, 64).t(), "portable", "not contiguous"),
        (lambda: torch.ones(1, 64).expand(64, 64), "portable", "overlap"),
        (lambda: torch.ones(0, 64), "portable", "elements"),
    ],
    ids=["dense", "padded", "odd stride", "offset", "transposed", "expanded", "empty"],
)
def test_path_by_layout(x, path, reason):
    module = LinearBatchNorm1d(64, 128, device="cuda", dtype=BF16)
    input = x()
    strides, offset = input.stride(), input.storage_offset()
    storage = torch.ones(
        input.untyped_storage().size() // input.element_size(), device="cuda", dtype=BF16
    )
    plan = explain(module, storage.as_strided(input.shape, strides, offset))
    assert plan.path == path, plan
    assert reason in plan.reason


@pytest.mark.gpu
@hopper
def test_path_by_output():
    """In eval the GEMM writes y, whose rows must be whole 16-byte units; in training a padded u."""
    x = torch.ones(32, 64, device="cuda", dtype=BF16)
    module = LinearBatchNorm1d(64, 12, device="cuda", dtype=BF16)
    assert explain(module, x).path == "fused"
    assert explain(module.eval(), x).path == "portable"
    with torch.autocast("cuda", dtype=FP16):
        assert explain(LinearBatchNorm1d(64, 128, device="cuda"), x.float()).path == "fused"


@pytest.mark.gpu
def test_batch_norm_formats():
    module = BatchNorm2d(8).cuda()
    x = torch.ones(2, 8, 4, 4, device="cuda")
    assert explain(module, x) == Plan("kernels", "NCHW", "")
    assert explain(module, x.to(memory_format=torch.channels_last)) == Plan(
        "kernels", "channels_last", ""
    )
    assert explain(module, x[:, :, ::2]).reason
    assert explain(module, x.double()).path == "reference"


@pytest.mark.gpu
def test_without_the_library(monkeypatch):
    monkeypatch.setattr(cutlass_bn._library, "_load_error", "somebody removed it")
    with pytest.raises(RuntimeError, match="somebody removed it"):
        explain(LinearBatchNorm1d(64, 128, device="cuda"), torch.ones(2, 64, device="cuda"))
