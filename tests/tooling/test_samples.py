"""The Python in the documents runs as printed; without a GPU on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from vision import timm, torchvision

import cutlass_bn
import cutlass_bn.backend  # registered, installed or not

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
CUDA = re.compile(r'\.cuda\(\)|, device="cuda"')


@pytest.fixture(autouse=True)
def _precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def run(name: str, **variables) -> dict:
    """All of a document, as one program. Returns its variables."""
    samples = SAMPLE.findall((ROOT / name).read_text())
    assert samples
    for sample in samples:
        exec(sample if torch.cuda.is_available() else CUDA.sub("", sample), variables)
    return variables


def test_readme(capsys):
    found = run("README.md")
    printed = capsys.readouterr().out
    assert "layer1.0.bn3: fused: BatchNorm2d + residual + relu" in printed
    assert (found["y"] >= 0).all()
    assert found["head"].gemm.weight.grad is not None
    norms = [m for m in found["model"].modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert {type(norm) for norm in norms} == {torch.nn.BatchNorm2d}


def test_integration():
    model = torchvision.models.resnet18()
    found = run("docs/integration.md", model=model, torch=torch, timm=timm, cutlass_bn=cutlass_bn)
    assert found["report"]["layer1.0.bn2"] == (
        "fused: BatchNorm2d + residual + relu, with layer1.0.relu"
    )
    assert found["report"]["fc"] == "left alone: filter_fn"
    assert any(isinstance(m, cutlass_bn.BatchNormAct2d) for m in found["model"].modules())
