"""Finds and loads libcutlass_bn.so, the compiled operators.

Importing this module loads the library where there is one. It needs no GPU, no driver and no CUDA
build of torch, and never fails: why nothing was loaded is kept and said by `require()`, which the
CUDA paths call. The CPU path needs none.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from ._version import __version__

_MINIMUM_TORCH = (2, 11)  # the stable ABI that the library is compiled against
_NEWEST_OP = "fp32_matmul"
_HOW_TO_BUILD = (
    "To build it, with a CUDA toolkit (nvcc) 12.8 or newer and torch installed, run "
    "`pip install .` in a checkout of cutlass_bn (or `make build` for a checkout used in place)."
)


def library_path() -> Path:
    """Where the library is looked for: `$CUTLASS_BN_LIBRARY`, or lib/ inside the package."""
    override = os.environ.get("CUTLASS_BN_LIBRARY")
    return Path(override) if override else Path(__file__).parent / "lib" / "libcutlass_bn.so"


def _read_build_info(path: Path) -> dict[str, Any]:
    function = ctypes.CDLL(str(path)).cutlass_bn_build_info
    function.restype = ctypes.c_char_p
    return json.loads(function())


def _load(path: Path) -> tuple[dict[str, Any], str | None]:
    """(what the library says of its build, None) or ({}, why it is not loaded)."""
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version and tuple(map(int, version.groups())) < _MINIMUM_TORCH:
        needed = ".".join(map(str, _MINIMUM_TORCH))
        return {}, f"it needs torch {needed} or newer, and this is torch {torch.__version__}"
    if not path.is_file():
        return {}, f"there is no file {path} (a CPU-only installation has none)"
    try:
        torch.ops.load_library(path)
        info = _read_build_info(path)
    except (OSError, AttributeError, RuntimeError) as error:
        return {}, f"{path} could not be loaded: {error}"
    if info["version"] != __version__:
        built = info["version"]
        return {}, f"{path} was built for version {built}, the Python package is {__version__}"
    if not hasattr(torch.ops.cutlass_bn, _NEWEST_OP):  # a checkout used in place that moved on
        return {}, f"{path} is older than the Python package: it has no operator {_NEWEST_OP}"
    return info, None


_build_info, _load_error = _load(library_path())


def library_is_loaded() -> bool:
    """Whether the compiled operators are available. Says nothing about a GPU."""
    return _load_error is None


def require() -> None:
    """Raises RuntimeError, with the reason and the remedy, unless the library is loaded."""
    if _load_error is not None:
        what = "cutlass_bn: CUDA tensors need the compiled library"
        raise RuntimeError(f"{what}, and {_load_error}. {_HOW_TO_BUILD}")


def build_info() -> dict[str, Any]:
    """What is installed: a new dict.

    Always: `version` (of the Python package), `library` (its path, None where it is not loaded) and
    `error` (why not, else None). With the library also what it was built with: `cuda`, `cutlass`,
    `torch` (versions), `build_type`, `architectures` and `gemm_architectures` (lists as CMake
    writes them: "90-real" is machine code, "100" machine code and PTX), and `sources` (the
    fingerprint of the C++ and CUDA sources that tools/fingerprint.py computes).
    """
    library = str(library_path()) if library_is_loaded() else None
    return {**_build_info, "version": __version__, "library": library, "error": _load_error}
