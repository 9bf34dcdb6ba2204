"""Runs the GPU tests and the quick benchmark and records what came out; says later whether the record still holds.

`run` needs a CUDA device, torch, pytest and a library in cutlass_bn/lib (which may have been built elsewhere), and
writes bench/results/gpu-check.json. `status` needs none of these: it compares the record with the files as they are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from fingerprint import CHECKED_SOURCES, ROOT, combine, file_hashes, library_fingerprint

RECORD = ROOT / "bench" / "results" / "gpu-check.json"


def describe_machine() -> dict[str, Any]:
    """Device, driver and versions. RuntimeError where there is no CUDA device or no usable library."""
    import torch

    import cutlass_bn

    if Path(cutlass_bn.__file__).resolve().parent != ROOT / "cutlass_bn":
        raise RuntimeError(f"{cutlass_bn.__file__} is not the cutlass_bn of this checkout")
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device (torch.cuda.is_available() is False)")
    build = cutlass_bn.build_info()
    if not cutlass_bn.library_is_loaded():
        raise RuntimeError(f"the compiled library is not loaded: {build['error']}")
    if build["sources"] != library_fingerprint():
        raise RuntimeError(f"{build['library']} was built from other sources than the ones here: rebuild it")
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "build": {name: value for name, value in build.items() if name not in ("library", "error")},
    }


def run_tests(scratch: Path, pytest_args: list[str]) -> dict[str, Any]:
    """The `gpu` tests: counts, and the names of those that failed."""
    report = scratch / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}", *pytest_args]
    status = subprocess.run(command, cwd=ROOT).returncode
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0, "exit_status": status, "failures": []}
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "exit_status": status,
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
    }


def run_benchmark(scratch: Path) -> dict[str, Any]:
    """The quick workloads: exit status (not 0 where a result misses its contract) and the benchmark's own JSON."""
    output = scratch / "workloads.json"
    command = [sys.executable, "-m", "bench", "workloads", "--quick", "--json", str(output)]
    status = subprocess.run(command, cwd=ROOT).returncode
    return {"exit_status": status, "results": json.loads(output.read_text()) if output.exists() else None}


def problems_of(record: dict[str, Any]) -> list[str]:
    """Why the recorded run is red; empty if it is green."""
    tests, benchmark = record["tests"], record["benchmark"]
    problems = [f"failed: {name}" for name in tests["failures"]]
    if tests["exit_status"] != 0 and not problems:
        problems.append(f"pytest ended with status {tests['exit_status']}")
    if tests["passed"] == 0:
        problems.append("no GPU test passed")
    if benchmark["exit_status"] != 0:
        problems.append(f"the benchmark ended with status {benchmark['exit_status']}")
    return problems


def run(pytest_args: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    try:
        machine = describe_machine()
    except (ImportError, RuntimeError) as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    files = file_hashes(CHECKED_SOURCES)  # before the run: what is edited meanwhile must count as stale
    with tempfile.TemporaryDirectory() as scratch:
        record = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "fingerprint": combine(files),
            "machine": machine,
            "tests": run_tests(Path(scratch), pytest_args),
            "benchmark": run_benchmark(Path(scratch)),
            "files": files,
        }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {os.path.relpath(RECORD)}")
    return status()


def status() -> int:
    """Prints one line, OK, STALE, RED or MISSING, and what it is about; 0 only for OK."""
    if not RECORD.exists():
        print("MISSING: no GPU check is recorded; run `make gpu-check` on a machine with a GPU")
        return 1
    record = json.loads(RECORD.read_text())
    tests, machine = record["tests"], record["machine"]
    summary = (
        f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped on {machine['device']} "
        f"(driver {machine['driver']}, torch {machine['torch']}) at {record['date']}"
    )
    recorded, current = record["files"], file_hashes(CHECKED_SOURCES)
    changed = sorted(path for path in recorded.keys() | current.keys() if recorded.get(path) != current.get(path))
    problems = problems_of(record)
    verdict = "RED" if problems else "STALE" if changed else "OK"
    print(f"{verdict}: {summary}")
    for problem in problems:
        print(f"  {problem}")
    if changed:
        names = ", ".join(changed[:8]) + (", ..." if len(changed) > 8 else "")
        print(f"  {len(changed)} files differ from the ones checked: {names}")
    return 0 if verdict == "OK" else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run the check and record it")
    runner.add_argument("pytest_args", nargs="*", help="further arguments for pytest, after --")
    commands.add_parser("status", help="compare the record with the sources")
    arguments = parser.parse_args()
    return status() if arguments.command == "status" else run(arguments.pytest_args)


if __name__ == "__main__":
    sys.exit(main())
