"""The architecture as rules: what may include or import what, and that every source is built."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

# What each folder of csrc may include of the others.
CSRC_LAYERS = {
    "common": {"common"},
    "batch_norm": {"common", "batch_norm"},
    "linear_bn": {"common", "batch_norm", "linear_bn"},
    "ops": {"common", "batch_norm", "linear_bn", "ops"},
}
# Modules of cutlass_bn from the lowest layer up: each may import those before it and itself.
PYTHON_LAYERS = [
    "_version",
    "_library",
    "_activations",
    "reference",
    "cpu",
    "ops",
    "functional",
    "modules",
    "convert",
    "_explain",
    "backend",
]
MAX_LINES = 400


def sources(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def cpp_files(layer: str) -> list[Path]:
    return sources(CSRC / layer, ".h", ".cuh", ".cu", ".cpp")


def includes_of(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text())


@pytest.mark.parametrize("layer", ["common", "batch_norm", "linear_bn"])
def test_kernels_are_free_of_torch(layer):
    offenders = [
        f"{path.relative_to(ROOT)}: {include}"
        for path in cpp_files(layer)
        for include in includes_of(path)
        if include.split("/")[0] in ("torch", "ATen", "c10")
    ]
    assert not offenders


@pytest.mark.parametrize("layer", CSRC_LAYERS)
def test_csrc_dependencies_point_one_way(layer):
    offenders = [
        f"{path.relative_to(ROOT)}: {include}"
        for path in cpp_files(layer)
        for include in includes_of(path)
        if include.split("/")[0] in CSRC_LAYERS.keys() - CSRC_LAYERS[layer]
    ]
    assert not offenders


def test_only_the_gemm_knows_cutlass():
    gemm = CSRC / "linear_bn" / "gemm"
    offenders = [
        str(path.relative_to(ROOT))
        for path in sources(CSRC, ".h", ".cuh", ".cu", ".cpp")
        if gemm not in path.parents
        and any(include.split("/")[0] in ("cutlass", "cute") for include in includes_of(path))
    ]
    assert not offenders


def package_imports(path: Path) -> Iterator[str]:
    """The modules directly under cutlass_bn that a file of it imports, relatively or not."""
    package = ["cutlass_bn", *path.relative_to(ROOT / "cutlass_bn").parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "cutlass_bn" and len(parts) > 1:
                yield parts[1]


def test_python_dependencies_point_one_way():
    offenders = []
    for path in sources(ROOT / "cutlass_bn", ".py"):
        layer = path.relative_to(ROOT / "cutlass_bn").parts[0].removesuffix(".py")
        if layer == "__init__":
            continue
        assert layer in PYTHON_LAYERS, f"{layer}: say in PYTHON_LAYERS which layer it belongs to"
        above = PYTHON_LAYERS[PYTHON_LAYERS.index(layer) + 1 :]
        offenders += [
            f"{path.relative_to(ROOT)}: {name}" for name in package_imports(path) if name in above
        ]
    assert not offenders


def listed_in_cmake() -> list[str]:
    return re.findall(r"^\s+(csrc/\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)


def test_cmake_lists_every_source():
    listed = listed_in_cmake()
    compiled = {name for name in listed if name.endswith((".cu", ".cpp"))}
    assert compiled == {path.relative_to(ROOT).as_posix() for path in sources(CSRC, ".cu", ".cpp")}
    assert len(listed) == len(set(listed))


def test_installed_headers_are_complete():
    """What an installed header includes is installed too, and needs neither CUTLASS nor nvcc."""
    installed = {name.removeprefix("csrc/") for name in listed_in_cmake() if name.endswith(".h")}
    needed = {include for name in installed for include in includes_of(CSRC / name)}
    assert {
        include for include in needed if include.split("/")[0] in {*CSRC_LAYERS, "cutlass", "cute"}
    } <= installed


def test_no_file_is_overlong():
    files = sources(CSRC, ".h", ".cuh", ".cu", ".cpp")
    for folder in ("bench", "cutlass_bn", "examples", "tests", "tools"):
        files += sources(ROOT / folder, ".py", ".cpp")
    overlong = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {name: lines for name, lines in overlong.items() if lines > MAX_LINES}
