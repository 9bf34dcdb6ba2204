"""Runs the GPU tests and the quick benchmark and records what came out; says later if it holds.

`run` needs a CUDA device, torch, pytest and a library in cutlass_bn/lib (which may have been built
elsewhere), and writes bench/results/gpu-check.json. `status` needs the standard library alone: it
compares the record's fingerprint with that of the sources as they are.
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
from collections import Counter
from pathlib import Path
from typing import Any

from fingerprint import ROOT, checked_fingerprint, library_fingerprint

RECORD = ROOT / "bench" / "results" / "gpu-check.json"


def describe_machine() -> dict[str, Any]:
    """Device, driver, versions. RuntimeError where there is no CUDA device or usable library."""
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
        problem = "was built from other sources than the ones here: rebuild it"
        raise RuntimeError(f"{build['library']} {problem}")
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
        "build": {name: build[name] for name in build if name not in ("library", "error")},
    }


def run_tests(scratch: Path, pytest_args: list[str]) -> dict[str, Any]:
    """The `gpu` tests: counts, the names of those that failed, why some were skipped."""
    report = scratch / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}"]
    status = subprocess.run([*command, *pytest_args], cwd=ROOT).returncode
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    bad = [case for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skips = Counter(skip.get("message") for case in cases for skip in case.iter("skipped"))
    return {
        "exit_status": status,
        "passed": len(cases) - len(bad) - skips.total(),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
        "skips": dict(skips.most_common()),
    }


def run_benchmark(scratch: Path) -> tuple[int, list[dict[str, Any]]]:
    """Of the quick workloads: exit status (not 0 where a contract is missed) and rows."""
    output = scratch / "workloads.json"
    command = [sys.executable, "-m", "bench", "workloads", "--quick", "--json", str(output)]
    status = subprocess.run(command, cwd=ROOT).returncode
    return status, json.loads(output.read_text())["rows"] if output.exists() else []


def problems_of(record: dict[str, Any]) -> list[str]:
    """Why the recorded run is red; empty if it is green."""
    tests, benchmark = record["tests"], record["benchmark_exit_status"]
    problems = [f"failed: {name}" for name in tests["failures"]]
    if tests["exit_status"] != 0 and not problems:
        problems.append(f"pytest ended with status {tests['exit_status']}")
    if tests["passed"] == 0:
        problems.append("no GPU test passed")
    if benchmark != 0:
        problems.append(f"the benchmark ended with status {benchmark}")
    return problems


def run(pytest_args: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    try:
        machine = describe_machine()
    except (ImportError, RuntimeError) as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    fingerprint = checked_fingerprint()  # before the run: what is edited meanwhile is stale
    with tempfile.TemporaryDirectory() as scratch:
        tests = run_tests(Path(scratch), pytest_args)
        status_of_benchmark, rows = run_benchmark(Path(scratch))
    now = datetime.datetime.now(datetime.timezone.utc)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "fingerprint": fingerprint,
        "machine": machine,
        "tests": tests,
        "benchmark_exit_status": status_of_benchmark,
    }
    head, lines = json.dumps(record, indent=1), ",\n".join(f"  {json.dumps(row)}" for row in rows)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(head.removesuffix("\n}") + f',\n "benchmark": [\n{lines}\n ]\n}}\n')
    print(f"wrote {os.path.relpath(RECORD)}")
    return status()


def status() -> int:
    """Prints OK, STALE, RED or MISSING, and what it is about; 0 only for OK."""
    if not RECORD.exists():
        print("MISSING: no GPU check is recorded; run `make gpu-check` on a machine with a GPU")
        return 1
    record = json.loads(RECORD.read_text())
    tests, machine, problems = record["tests"], record["machine"], problems_of(record)
    stale = record["fingerprint"] != checked_fingerprint()
    verdict = "RED" if problems else "STALE" if stale else "OK"
    print(
        f"{verdict}: {tests['passed']} passed, {len(tests['failures'])} failed, "
        f"{sum(tests['skips'].values())} skipped on {machine['device']} "
        f"(driver {machine['driver']}, torch {machine['torch']}) at {record['date']}"
    )
    for problem in problems:
        print(f"  {problem}")
    if stale:
        print("  the sources are not the ones that were checked")
    return 0 if verdict == "OK" else 1


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run the check and record it")
    runner.add_argument("pytest_args", nargs="*", help="further arguments for pytest, after --")
    commands.add_parser("status", help="compare the record with the sources")
    arguments = parser.parse_args()
    return status() if arguments.command == "status" else run(arguments.pytest_args)


if __name__ == "__main__":
    sys.exit(main())
