"""A fingerprint of the sources over file contents alone: no git, no time stamps, only the standard library.

`library_fingerprint` is compiled into the library; `file_hashes` says what a recorded GPU check was run on
(tools/gpu_check.py).
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What the library is compiled from, and what a GPU check exercises.
LIBRARY_SOURCES = ("csrc/**/*", "CMakeLists.txt", "cmake/*")
CHECKED_SOURCES = (*LIBRARY_SOURCES, "cutlass_bn/**/*.py", "tests/**/*.py", "bench/**/*.py")


def file_hashes(patterns: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """sha256 of every file that matches, by its path relative to `root`, sorted."""
    paths = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
        if "__pycache__" not in path.parts
    }


def combine(hashes: dict[str, str]) -> str:
    """One fingerprint of many files, their paths included."""
    return hashlib.sha256("".join(f"{path} {digest}\n" for path, digest in sorted(hashes.items())).encode()).hexdigest()


def library_fingerprint(root: Path = ROOT) -> str:
    """Of all that decides what libcutlass_bn.so is compiled to, compilers apart."""
    return combine(file_hashes(LIBRARY_SOURCES, root))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--header", type=Path, help="write it as a C macro to this file, if it has changed")
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
