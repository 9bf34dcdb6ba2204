"""compute-sanitizer over the GPU tests marked `sanitize`: memcheck, and racecheck of shared memory.

Needs a CUDA device, torch, pytest, the compiled library and compute-sanitizer on PATH or in
$CUDA_HOME. The tests run once without it first, so that a plain failure is not mistaken for a
finding.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
# torch's caching allocator would hide accesses past the end of a tensor.
ENVIRONMENT = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(str(Path(home) / "bin") for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def main() -> int:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("gpu-sanitize: no compute-sanitizer on PATH or in CUDA_HOME", file=sys.stderr)
        return 2
    common = [sanitizer, "--error-exitcode=9", "--print-limit=20"]
    racecheck = [*common, "--tool=racecheck", "--kernel-name=kernel_substring=cutlass_bn"]
    runs: dict[str, tuple[list[str], str]] = {
        "plain": ([], "sanitize"),
        "memcheck": ([*common, "--tool=memcheck"], "sanitize"),
        # It fails inside some of cuBLAS's kernels.
        "racecheck": (racecheck, "sanitize and not cublas"),
    }
    for name, (prefix, tests) in runs.items():
        print(f"== {name}", flush=True)
        status = subprocess.run(
            [*prefix, *PYTEST, "-m", tests], cwd=ROOT, env=ENVIRONMENT
        ).returncode
        if status != 0:
            print(f"gpu-sanitize: {name} failed with status {status}", file=sys.stderr)
            return 1
    print("gpu-sanitize: clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
