"""Runs the two problems by KernelBench's rules; adds errors against float64 and the room left.

The rules: both models are built under the same seed, on the CPU, and cast and moved as a whole; no
state dict is copied; neither is put into eval mode; they run under no_grad; every trial has its own
seed and inputs; the new model is correct where the outputs have the same shape and agree by
allclose with atol = rtol = 1e-4 in fp32, 1e-2 in halves.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
PROBLEMS = ("bn2d", "gemm_scale_bn")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


@dataclass(frozen=True)
class Trial:
    """One seed. `difference` and the errors, of each model against float64, are the largest."""

    correct: bool
    difference: float
    used: float  # largest share of the allowed, atol + rtol |expected|
    error: float
    error_new: float


def load(name: str, reduced: bool) -> ModuleType:
    """A fresh copy of the problem's module, at full size or at its size for lack of a GPU."""
    # The second: this checkout's cutlass_bn, where none is installed.
    for folder in (HERE, HERE.parent.parent):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    problem = importlib.reload(importlib.import_module(name))
    if reduced:
        vars(problem).update(problem.REDUCED)
    return problem


def build(model: type[nn.Module], problem: ModuleType, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    init_inputs = problem.get_init_inputs()
    torch.manual_seed(seed)
    return model(*init_inputs)


def make_inputs(
    problem: ModuleType, seed: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Drawn on the device: 4 GB from the host would take longer than everything else."""
    torch.manual_seed(seed)
    with device:
        return [x.to(dtype) for x in problem.get_inputs()]


def _max_difference(a: Tensor, b: Tensor, tolerance: float | None = None) -> float:
    """Of a and b, or as a share of the tolerance. Slices of dim 1 bound the float64 copies."""
    largest = []
    for p, q in zip(a.split(8, 1), b.split(8, 1), strict=True):
        difference = (p.double() - q).abs_()
        largest.append(
            (
                difference if tolerance is None else difference / (tolerance + tolerance * q.abs())
            ).max()
        )
    return torch.stack(largest).max().item()


@torch.no_grad()
def check(problem: ModuleType, device: torch.device, precision: str, seed: int) -> Trial:
    dtype, tolerance = DTYPES[precision], TOLERANCES[precision]
    inputs = make_inputs(problem, seed, device, dtype)
    model = build(problem.Model, problem, seed).to(device, dtype)
    model_new = build(problem.ModelNew, problem, seed).to(device, dtype)
    exact = copy.deepcopy(model).double()(*(x.double() for x in inputs))
    expected = model(*inputs)
    got = model_new(*inputs)
    correct = got.shape == expected.shape and torch.allclose(
        got, expected, atol=tolerance, rtol=tolerance
    )
    difference = used = float("nan")
    if got.shape == expected.shape:
        difference, used = _max_difference(got, expected), _max_difference(got, expected, tolerance)
    return Trial(
        correct, difference, used, _max_difference(expected, exact), _max_difference(got, exact)
    )


@torch.no_grad()
def measure(
    problem: ModuleType, device: torch.device, precision: str, calls: int
) -> tuple[float, float]:
    """Median milliseconds of Model and ModelNew, one call of each in turn."""
    inputs = make_inputs(problem, 0, device, DTYPES[precision])
    models = [
        build(kind, problem, 0).to(device, DTYPES[precision])
        for kind in (problem.Model, problem.ModelNew)
    ]
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(calls + 3):  # three to warm up
        for model, times in zip(models, samples, strict=True):
            if device.type == "cuda":
                start, end = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                start.record()
                model(*inputs)
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
            else:
                begin = time.perf_counter()
                model(*inputs)
                times.append(1e3 * (time.perf_counter() - begin))
    return median(samples[0][3:]), median(samples[1][3:])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "problems", nargs="*", metavar="PROBLEM", help=f"of {', '.join(PROBLEMS)} (all)"
    )
    parser.add_argument(
        "--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--trials", type=int, default=5, help="seeds to check")
    parser.add_argument("--calls", type=int, default=50, help="calls to time")
    args = parser.parse_args(arguments)
    for name in args.problems:
        if name not in PROBLEMS:
            parser.error(f"no problem {name}")
    reduced = args.device.type != "cuda"
    if reduced:
        print("No CUDA GPU: reduced sizes on the CPU. Results are checked; speeds mean nothing.")

    correct = True
    for name in args.problems or PROBLEMS:
        problem = load(name, reduced)
        trials = [
            check(problem, args.device, args.precision, seed)
            for seed in range(42, 42 + args.trials)
        ]
        passed = sum(trial.correct for trial in trials)
        difference, used, error, error_new = (
            max(getattr(trial, field) for trial in trials)
            for field in ("difference", "used", "error", "error_new")
        )
        print(
            f"{name} {args.precision}: {passed} of {len(trials)} trials correct, "
            f"largest difference {difference:.1e}"
        )
        print(
            f"  largest |error| of y against float64: Model {error:.1e}, ModelNew {error_new:.1e}"
        )
        tolerance = TOLERANCES[args.precision]
        room = f", room for {1 / used:.1f} times as much" if 0 < used < 1 else ""
        print(
            f"  allowed {tolerance:g} + {tolerance:g} |y|, of which "
            f"the difference takes {used:.1%}{room}"
        )
        if passed == len(trials):
            old, new = measure(problem, args.device, args.precision, args.calls)
            print(f"  Model {old:.3f} ms, ModelNew {new:.3f} ms, {old / new:.2f}x")
        else:
            print("  FAILED: a wrong result has no speed")
            if error_new <= error:
                print(
                    "  (ModelNew is nearer to float64: Model's own rounding leaves the tolerance)"
                )
            correct = False
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
