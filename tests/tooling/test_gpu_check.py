"""tools/gpu_check.py on a small tree whose torch, package, tests and benchmark are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

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
sources = fingerprint.library_fingerprint()
library_is_loaded = lambda: True
build_info = lambda: {"version": "1", "library": "here", "error": None, "sources": sources}
""",
    "bench/__init__.py": "",
    "bench/__main__.py": """
import sys
open(sys.argv[sys.argv.index("--json") + 1], "w").write('{"rows": [{"ms": 1.5}]}')
""",
    "tests/test_it.py": """
import pytest

@pytest.mark.gpu
def test_good(): pass

@pytest.mark.gpu
@pytest.mark.parametrize("_", "ab")
def test_skipped(_): pytest.skip("not today")

def test_not_on_a_gpu(): assert False
""",
}


@pytest.fixture
def tree(tmp_path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=lambda *_: ["__pycache__"])
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


def test_a_good_run_is_ok_until_a_source_changes(tree):
    assert gpu_check(tree, "status")[1].startswith("MISSING")
    status, output = gpu_check(tree, "run")
    assert status == 0, output
    status, output = gpu_check(tree, "status")
    assert status == 0
    assert output.startswith("OK: 1 passed, 0 failed, 2 skipped on Stand-in GPU")
    record = json.loads((tree / "bench" / "results" / "gpu-check.json").read_text())
    assert record["benchmark"] == [{"ms": 1.5}]
    assert record["tests"]["skips"] == {"not today": 2}
    assert record["machine"]["torch"] == "2.99"

    (tree / "notes.md").write_text("no source")
    assert gpu_check(tree, "status")[0] == 0
    (tree / "csrc" / "kernel.cu").write_text("// another kernel")
    status, output = gpu_check(tree, "status")
    assert status == 1
    assert output.startswith("STALE")
    assert "the sources are not the ones that were checked" in output


def test_what_fails_is_red(tree):
    bad = "import pytest\n@pytest.mark.gpu\ndef test_bad(): assert False\n"
    (tree / "tests" / "test_bad.py").write_text(bad)
    (tree / "bench" / "__main__.py").write_text("raise SystemExit(3)\n")
    status, output = gpu_check(tree, "run")
    assert status == 1
    assert "RED: 1 passed, 1 failed" in output
    assert "failed: tests.test_bad::test_bad" in output
    assert "the benchmark ended with status 3" in output


def replace_in(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def of_other_sources(tree: Path) -> None:
    replace_in(tree / "cutlass_bn" / "__init__.py", "fingerprint.library_fingerprint()", "'0123'")


def of_another_checkout(tree: Path) -> None:
    """Where an editable installation of one comes first, that one would be tested."""
    (tree / "elsewhere").mkdir()
    (tree / "cutlass_bn").rename(tree / "elsewhere" / "cutlass_bn")
    replace_in(tree / "sitecustomize.py", "import sys", "import sys; sys.path[:0] = ['elsewhere']")
    (tree / "cutlass_bn").mkdir()


def without_a_gpu(tree: Path) -> None:
    replace_in(tree / "torch.py", "lambda: True", "lambda: False")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_other_sources, "was built from other sources than the ones here: rebuild it"),
        (of_another_checkout, "is not the cutlass_bn of this checkout"),
        (without_a_gpu, "there is no CUDA device"),
    ],
)
def test_what_would_prove_nothing_is_refused(change, message, tree):
    change(tree)
    status, output = gpu_check(tree, "run")
    assert status == 2
    assert message in output
    assert not (tree / "bench" / "results" / "gpu-check.json").exists()
