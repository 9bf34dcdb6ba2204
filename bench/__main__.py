"""Compares cutlass_bn with PyTorch, or shows what a recorded comparison says.

python -m bench workloads --quick           the two workloads, about a minute
python -m bench all --json results.json     every suite
python -m bench show|bars|plot [FILE]       the recorded H200 run unless a file is named
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import report
from .environment import ROOT, clocks_under_load, describe, measure_ceilings
from .records import OK, OURS, RECORDED, Run
from .suites import SUITES, Options, plan, run_step


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for suite in (*SUITES, "all"):
        sub = commands.add_parser(suite)
        sub.add_argument("--quick", action="store_true", help="fewer cases and rounds")
        sub.add_argument(
            "--json", type=Path, metavar="FILE", help="where to record the run; rewritten after every case"
        )
        sub.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
        sub.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
        sub.add_argument("--max-autotune", action="store_true", help="add torch.compile's max-autotune-no-cudagraphs")
        sub.add_argument("--seconds", type=float, help="of timing a case (1.5, quick 0.5, on the CPU 0.2)")
        sub.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    for command in ("show", "bars", "plot"):
        sub = commands.add_parser(command)
        sub.add_argument("file", type=Path, nargs="?", default=RECORDED)
        if command == "plot":
            sub.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
        else:
            sub.add_argument("--markdown", action="store_true")
    return parser.parse_args(arguments)


def run_suites(args: argparse.Namespace) -> Run:
    options = Options(
        device=args.device,
        quick=args.quick,
        compile=not args.no_compile,
        max_autotune=args.max_autotune,
        seconds=args.seconds or (0.2 if args.device.type != "cuda" else 0.5 if args.quick else 1.5),
        only=args.only,
    )
    suites = SUITES if args.command == "all" else (args.command,)
    torch.manual_seed(0)
    run = Run(describe(args.device), options={"suites": list(suites), "quick": args.quick, "seconds": options.seconds})
    run.ceilings = measure_ceilings(args.device, args.quick)
    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    steps = plan(suites, options)
    with Progress(*columns, console=report.console(), transient=True) as progress:
        task = progress.add_task("bench", total=len(steps), now="")
        for suite, case in steps:
            progress.update(task, now=case.name if case else suite)
            run.rows += run_step(suite, case, options, run.ceilings)
            if args.json:
                run.save(args.json)
            progress.advance(task)
    if options.on_gpu:
        run.environment["clocks"] = clocks_under_load(args.device)
    if args.json:
        run.save(args.json)
    return run


def show_recorded() -> None:
    out = report.console()
    if RECORDED.exists():
        out.rule("recorded on an H200")
        report.show(Run.load(RECORDED), out)
    else:
        out.print("No H200 run is recorded (bench/results/h200.json).")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    out = report.console()
    if args.command in ("show", "bars", "plot"):
        if not args.file.exists():
            print(f"no such file: {args.file}", file=sys.stderr)
            return 2
        run = Run.load(args.file)
        if args.command == "plot":
            from . import plots

            for path in plots.write(run, args.out):
                print(path)
        elif args.markdown:
            print(report.markdown(run) if args.command == "show" else report.bars_markdown(run))
        elif args.command == "show":
            report.show(run, out)
        else:
            report.show_bars(run, out)
        return 0

    if args.device.type != "cuda":
        out.print("torch.compile is left out on the CPU: it would take longer than all the rest.", highlight=False)
        if args.command in ("kernels", "all"):
            out.print("The kernels suite needs a CUDA GPU and is left out.", highlight=False)
    run = run_suites(args)
    report.show(run, out)
    if args.device.type != "cuda":
        show_recorded()
    elif args.command == "all":
        report.show_bars(run, out)
    wrong = [row for row in run.rows if row.variant == OURS and row.status != OK]
    for row in wrong:
        out.print(f"{row.case}: {row.status}: {row.detail}", style="bold red", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
