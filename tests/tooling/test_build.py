"""Building and packaging: what is said when something is missing; CPU-only, sdist, C++ package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None, reason="needs cmake and ninja"
)

# No compiler of any kind may be started.
NO_COMPILERS = {"CC": "/bin/false", "CXX": "/bin/false", "CUDAHOSTCXX": "/bin/false"}


def run(
    *command: str | Path, cwd: Path = ROOT, expect_failure: bool = False, **environment: str
) -> str:
    """What the command printed, line breaks and runs of blanks as one blank."""
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert (result.returncode != 0) == expect_failure, result.stdout
    return " ".join(result.stdout.split())


def configure(build: Path, *arguments: str, expect_failure: bool = False) -> str:
    command = (
        "cmake",
        "-G",
        "Ninja",
        "-S",
        ROOT,
        "-B",
        build,
        f"-DPython_EXECUTABLE={sys.executable}",
        *arguments,
    )
    return run(*command, expect_failure=expect_failure, **NO_COMPILERS)


def fake_nvcc(folder: Path, release: str) -> str:
    """An argument for CMake: a compiler that does nothing but name its release."""
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return f"-DCMAKE_CUDA_COMPILER={nvcc}"


NO_NVCC = "-DCUTLASS_BN_NVCC="  # as if the search had found nothing


def test_cuda_on_without_nvcc_is_an_error(tmp_path):
    output = configure(tmp_path, "-DCUTLASS_BN_CUDA=ON", NO_NVCC, expect_failure=True)
    assert "CUTLASS_BN_CUDA=ON, but there is no CUDA compiler (nvcc)" in output
    assert "Install the CUDA toolkit 12.8 or newer, or set CUDACXX" in output


def test_auto_without_nvcc_is_cpu_only_and_says_so(tmp_path):
    output = configure(tmp_path, NO_NVCC)
    assert (
        "no CUDA compiler (nvcc) found: this is a CPU-only build without the compiled library"
        in output
    )
    run("cmake", "--build", tmp_path)


def test_off_needs_no_compiler(tmp_path):
    assert "CPU-only, no library is built" in configure(tmp_path, "-DCUTLASS_BN_CUDA=OFF")


def test_an_old_toolkit_is_an_error(tmp_path):
    output = configure(tmp_path, fake_nvcc(tmp_path, "12.4"), expect_failure=True)
    assert "CUDA 12.8 or newer is needed" in output
    assert "is 12.4" in output


def test_missing_torch_is_an_error(tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    output = configure(
        tmp_path, fake_nvcc(tmp_path, "13.0"), f"-DPython_EXECUTABLE={python}", expect_failure=True
    )
    assert f"{python} has no torch" in output
    assert "`pip install .`" in output
    assert "`pip install --no-build-isolation .` builds in yours" in output


def test_missing_cutlass_is_an_error(tmp_path):
    output = configure(
        tmp_path, fake_nvcc(tmp_path, "13.0"), f"-DCUTLASS_DIR={tmp_path}", expect_failure=True
    )
    assert f"no CUTLASS in CUTLASS_DIR={tmp_path}" in output
    assert "pip install nvidia-cutlass==4.2.0.0" in output


def test_an_old_cutlass_is_an_error(tmp_path):
    header = tmp_path / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 9\n#define CUTLASS_PATCH 2\n")
    output = configure(
        tmp_path, fake_nvcc(tmp_path, "13.0"), f"-DCUTLASS_DIR={tmp_path}", expect_failure=True
    )
    assert "CUTLASS 4.2 or newer is needed" in output
    assert "has 3.9.2" in output


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("sdist")
    run(
        sys.executable, "-c", f"import scikit_build_core.build as b; b.build_sdist({str(folder)!r})"
    )
    [path] = folder.glob("*.tar.gz")
    return path


@pytest.mark.slow
def test_sdist_has_what_it_is_built_from_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listed = re.findall(r"^\s+(csrc/\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert {
        *listed,
        "CMakeLists.txt",
        "CMakePresets.json",
        "LICENSE",
        "README.md",
        "tools/fingerprint.py",
    } <= names
    assert not [
        name
        for name in names
        if name.endswith((".so", ".o", ".pyc")) or name.startswith((".venv", "build/"))
    ]


@pytest.mark.slow
def test_cpu_only_install_from_sdist_outside_git(sdist, tmp_path):
    """sdist -> wheel -> installed package, with no compiler, and the CPU path works there."""
    with tarfile.open(sdist) as archive:
        archive.extractall(
            tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    [source] = [path for path in tmp_path.iterdir() if path.is_dir()]
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", wheels,
        ".", cwd=source, CUTLASS_BN_CUDA="OFF", **NO_COMPILERS)  # fmt: skip
    [wheel] = wheels.glob("*.whl")
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "cutlass_bn/py.typed" in names
    assert all(name.startswith(("cutlass_bn/", "cutlass_bn-")) for name in names)
    assert not [name for name in names if name.endswith(".so")]

    run(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel)
    code = (
        "import torch, cutlass_bn; assert not cutlass_bn.library_is_loaded(); "
        "print(cutlass_bn.__file__, cutlass_bn.BatchNorm2d(3)(torch.rand(2, 3, 4, 4)).shape)"
    )
    # -S: an editable installation, which .pth files announce, would come first.
    path = os.pathsep.join([str(site), str(Path(torch.__file__).parents[1])])
    output = run(sys.executable, "-S", "-c", code, cwd=tmp_path, PYTHONPATH=path)
    assert output == f"{site}/cutlass_bn/__init__.py torch.Size([2, 3, 4, 4])"


@pytest.mark.slow
def test_cpp_package(tmp_path):
    """A C++ program finds the package, is built without torch, and runs where there is a GPU."""
    built = ROOT / "build" / "release"
    if not (built / "libcutlass_bn_kernels.a").exists():
        pytest.skip("needs a build of the preset `release`")
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    run("cmake", "--install", built, "--component", "cpp", "--prefix", prefix)
    run(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        ROOT / "examples" / "cpp",
        "-B",
        build,
        f"-DCMAKE_PREFIX_PATH={prefix}",
    )
    run("cmake", "--build", build)
    result = subprocess.run([build / "layers"], capture_output=True, text=True)
    assert "first channel of y" in result.stdout or "cudaMalloc" in result.stderr
