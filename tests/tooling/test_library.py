"""The compiled library: how it is found, what loading needs, what is said where it is missing."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cutlass_bn
from cutlass_bn import _library

ROOT = Path(__file__).resolve().parents[2]

needs_library = pytest.mark.skipif(
    not _library.library_is_loaded(), reason="the compiled library is not there"
)


def python(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@needs_library
def test_has_every_op():
    declared = re.findall(
        r'm\.def\(\s*"(\w+)\(', (ROOT / "csrc" / "ops" / "library.cpp").read_text()
    )
    assert {"batch_norm_inference", _library._NEWEST_OP} <= set(declared)
    for name in declared:
        assert getattr(torch.ops.cutlass_bn, name).default._schema.name == f"cutlass_bn::{name}"


@needs_library
def test_build_info():
    info = cutlass_bn.build_info()
    assert info["version"] == cutlass_bn.__version__
    assert info["library"] == str(_library.library_path())
    assert info["error"] is None
    has_gemm = any(name.startswith("90") for name in info["architectures"])
    assert info["gemm_architectures"] == ["90a-real"] * has_gemm
    assert re.fullmatch(r"[0-9a-f]{64}", info["sources"])
    info["version"] = "changed"
    assert cutlass_bn.build_info()["version"] == cutlass_bn.__version__


@needs_library
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_load_time_dependencies():
    """libtorch and the C++ runtime. CUDA's is inside, and no driver means no libcuda."""
    output = subprocess.run(
        ["readelf", "--dynamic", _library.library_path()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", output))
    assert "libtorch" in needed
    system = {"libc", "libdl", "libgcc_s", "libm", "libpthread", "librt", "libstdc++"}
    assert {name for name in needed if not name.startswith("ld-linux")} <= {"libtorch", *system}
    assert "RPATH" not in output
    assert "RUNPATH" not in output


@needs_library
def test_exports_nothing_that_could_clash():
    """The CUDA runtime inside must not stand in for torch's."""
    library = ctypes.CDLL(str(_library.library_path()))
    assert library.cutlass_bn_build_info
    readelf = shutil.which("readelf")
    if readelf:
        symbols = subprocess.run(
            [readelf, "--dyn-syms", "--wide", _library.library_path()],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        defined = [line for line in symbols.splitlines() if " UND " not in line]
        assert not [line for line in defined if re.search(r"\bcuda[A-Z]\w*$", line)]


def test_import_touches_no_cuda():
    """No context, no driver library, nothing that a fork would break."""
    output = python(
        """
import os, torch
def maps():
    lines = open("/proc/self/maps").read().splitlines()
    return {line.split("/")[-1] for line in lines if "libcuda.so" in line}
before = maps()
import cutlass_bn
assert maps() == before, maps()
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    torch.set_num_threads(1)
    y = cutlass_bn.BatchNorm2d(2)(torch.rand(2, 2, 3, 3))
    os._exit(0 if y.isfinite().all() else 1)
assert os.waitpid(pid, 0)[1] == 0
print("fine")
"""
    )
    assert output.strip() == "fine"


def test_without_library_the_cpu_works_and_cuda_says_how_to_build():
    output = python(
        """
import torch, cutlass_bn
from torch._subclasses.fake_tensor import FakeTensorMode
assert not cutlass_bn.library_is_loaded()
assert cutlass_bn.build_info()["library"] is None
print(cutlass_bn.BatchNorm2d(3)(torch.rand(2, 3, 4, 4)).shape)
print(cutlass_bn.LinearBatchNorm1d(3, 5)(torch.rand(4, 3)).shape)
with FakeTensorMode():
    shapes = (2, 3, 4, 4), (4, 3), (5, 3)
    image, x, weight = (torch.empty(shape, device="cuda") for shape in shapes)
for call in (
    lambda: cutlass_bn.functional.batch_norm(image, None, None, training=True),
    lambda: cutlass_bn.functional.linear_batch_norm(x, weight, training=True),
):
    try:
        call()
    except RuntimeError as error:
        print(error)
""",
        CUTLASS_BN_LIBRARY="/nowhere/libcutlass_bn.so",
    )
    shapes, errors = output.splitlines()[:2], output.splitlines()[2:]
    assert shapes == ["torch.Size([2, 3, 4, 4])", "torch.Size([4, 5])"]
    assert len(errors) == 2
    for error in errors:
        assert "/nowhere/libcutlass_bn.so" in error
        assert "`pip install .`" in error


def test_a_broken_library_is_reported(tmp_path):
    broken = tmp_path / "libcutlass_bn.so"
    broken.write_bytes(b"not a library")
    info, error = _library._load(broken)
    assert info == {}
    assert f"{broken} could not be loaded" in error


def test_an_older_torch_is_reported(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    _, error = _library._load(_library.library_path())
    assert error == "it needs torch 2.11 or newer, and this is torch 2.10.1+cu130"


@needs_library
def test_a_library_of_another_version_is_reported(monkeypatch):
    monkeypatch.setattr(_library, "__version__", "99.0.0")
    _, error = _library._load(_library.library_path())
    assert f"was built for version {cutlass_bn.__version__}, the Python package is 99.0.0" in error


@needs_library
def test_a_library_from_before_the_newest_op_is_reported(monkeypatch):
    monkeypatch.setattr(_library, "_NEWEST_OP", "op_of_tomorrow")
    info, error = _library._load(_library.library_path())
    assert info == {}
    assert error.endswith("is older than the Python package: it has no operator op_of_tomorrow")


def test_require_matches_library_is_loaded(monkeypatch):
    monkeypatch.setattr(_library, "_load_error", "it was taken away")
    assert not _library.library_is_loaded()
    with pytest.raises(
        RuntimeError, match=r"need the compiled library, and it was taken away\. To build it"
    ):
        _library.require()
    monkeypatch.setattr(_library, "_load_error", None)
    _library.require()
