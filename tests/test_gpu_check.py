"""tools/gpu_check.py on a small tree whose torch, package, tests and benchmark are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FILES = {
    # An editable installation of the real package would come before the stand-in.
    "sitecustomize.py": """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
""",
    "CMakeLists.txt": "",
    "csrc/kernel.cu": "// a kernel",
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['gpu: on a GPU']\n",
    "torch.py": """
from types import SimpleNamespace
__version__ = "2.99"
version = SimpleNamespace(cuda="13.0")
cuda = SimpleNamespace(
    is_available=lambda: True,
    get_device_properties=lambda _: SimpleNamespace(name="Stand-in GPU", major=9, minor=0),
)
""",
    "cutlass_bn/__init__.py": """
import sys
sys.path.insert(0, "tools")
import fingerprint
library_is_loaded = lambda: True
build_info = lambda: {"version": "1", "library": "here", "error": None, "sources": fingerprint.library_fingerprint()}
""",
    "bench/__init__.py": "",
    "bench/__main__.py": "import sys\nopen(sys.argv[sys.argv.index('--json') + 1], 'w').write('[1.5]')\n",
    "tests/test_it.py": """
import pytest

@pytest.mark.gpu
def test_good(): pass

@pytest.mark.gpu
def test_skipped(): pytest.skip("not today")

def test_not_on_a_gpu(): assert False
""",
}


@pytest.fixture
def tree(tmp_path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def gpu_check(tree: Path, command: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-B", tree / "tools" / "gpu_check.py", command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout + result.stderr


def test_no_record_is_missing(tree):
    status, output = gpu_check(tree, "status")
    assert status == 1
    assert output.startswith("MISSING")


def test_a_good_run_is_ok_until_a_source_changes(tree):
    status, output = gpu_check(tree, "run")
    assert status == 0, output
    status, output = gpu_check(tree, "status")
    assert status == 0
    assert output.startswith("OK: 1 passed, 0 failed, 1 skipped on Stand-in GPU")
    record = json.loads((tree / "bench" / "results" / "gpu-check.json").read_text())
    assert record["benchmark"] == {"exit_status": 0, "results": [1.5]}
    assert record["machine"]["torch"] == "2.99"

    (tree / "notes.md").write_text("no source")
    assert gpu_check(tree, "status")[0] == 0
    (tree / "csrc" / "kernel.cu").write_text("// another kernel")
    (tree / "tests" / "test_more.py").write_text("")
    status, output = gpu_check(tree, "status")
    assert status == 1
    assert output.startswith("STALE")
    assert "2 files differ from the ones checked: csrc/kernel.cu, tests/test_more.py" in output


def test_a_failing_test_is_red(tree):
    (tree / "tests" / "test_bad.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_bad(): assert False\n")
    status, output = gpu_check(tree, "run")
    assert status == 1
    assert "RED: 1 passed, 1 failed" in output
    assert "failed: tests.test_bad::test_bad" in output


def test_a_benchmark_that_misses_its_contract_is_red(tree):
    (tree / "bench" / "__main__.py").write_text("raise SystemExit(3)\n")
    status, output = gpu_check(tree, "run")
    assert status == 1
    assert "RED" in output
    assert "the benchmark ended with status 3" in output


def test_a_library_of_other_sources_is_refused(tree):
    package = tree / "cutlass_bn" / "__init__.py"
    package.write_text(package.read_text().replace("fingerprint.library_fingerprint()", "'0123'"))
    status, output = gpu_check(tree, "run")
    assert status == 2
    assert "was built from other sources than the ones here: rebuild it" in output
    assert not (tree / "bench" / "results" / "gpu-check.json").exists()


def test_another_installation_is_refused(tree):
    """Where an editable installation of another checkout comes first, that one would be tested."""
    (tree / "elsewhere").mkdir()
    (tree / "cutlass_bn").rename(tree / "elsewhere" / "cutlass_bn")
    with (tree / "sitecustomize.py").open("a") as file:
        file.write("sys.path.insert(0, 'elsewhere')\n")
    (tree / "cutlass_bn").mkdir()
    status, output = gpu_check(tree, "run")
    assert status == 2
    assert "is not the cutlass_bn of this checkout" in output


def test_no_gpu_is_said(tree):
    torch = tree / "torch.py"
    torch.write_text(torch.read_text().replace("lambda: True", "lambda: False"))
    status, output = gpu_check(tree, "run")
    assert status == 2
    assert "there is no CUDA device" in output
