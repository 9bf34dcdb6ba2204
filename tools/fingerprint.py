"""A fingerprint of the sources over file contents: no git, no time stamps, the standard library.

`library_fingerprint` is compiled into the library; `checked_fingerprint` says what a recorded GPU
check was run on (tools/gpu_check.py).
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What the library is compiled from, and what a GPU check exercises.
LIBRARY_SOURCES = ("csrc/**/*", "CMakeLists.txt", "cmake/*")
PYTHON_SOURCES = ("cutlass_bn/**/*.py", "tests/**/*.py", "bench/**/*.py")


def fingerprint(patterns: Iterable[str], root: Path = ROOT) -> str:
    """Of every file that matches, its path relative to `root` included."""
    paths = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    digests = {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
        if "__pycache__" not in path.parts
    }
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def library_fingerprint(root: Path = ROOT) -> str:
    """Of all that decides what libcutlass_bn.so is compiled to, compilers apart."""
    return fingerprint(LIBRARY_SOURCES, root)


def checked_fingerprint(root: Path = ROOT) -> str:
    """Of all that a GPU check depends on."""
    return fingerprint((*LIBRARY_SOURCES, *PYTHON_SOURCES), root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, help="write it as a C macro here, if it changed")
    header = parser.parse_args().header
    if header is None:
        print(library_fingerprint())
        return
    text = f'#define CUTLASS_BN_SOURCE_FINGERPRINT "{library_fingerprint()}"\n'
    if not header.exists() or header.read_text() != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)


if __name__ == "__main__":
    main()
