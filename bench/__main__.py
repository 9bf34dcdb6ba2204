"""Compares cutlass_bn with PyTorch, or shows what a recorded comparison says.

python -m bench workloads --quick           the two workloads, about a minute
python -m bench steps                       forward and backward: times, peak memory, errors of the gradients
python -m bench accuracy                    fp32 products beside SGEMM, against float64, on every kind of input
python -m bench crossover                   from which size on they are faster than SGEMM
python -m bench all --json results.json     every suite
python -m bench all --json results.json --resume --minutes 9    the same in pieces: again until nothing is left
python -m bench show|bars|plot [FILE]       the recorded H200 run unless a file is named
python -m bench documents [FILE]            writes its tables into the documents
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import groupby
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import documents, report
from .environment import ROOT, clocks_under_load, describe, measure_ceilings
from .records import OK, OURS, OURS_COMPILED, RECORDED, SPLIT, Run
from .suites import GPU_SUITES, SUITES, Options, plan

RECORD_COMMANDS = ("show", "bars", "plot", "documents")  # of a recorded run


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
        sub.add_argument("--resume", action="store_true", help="keep what the --json FILE holds and measure the rest")
        sub.add_argument("--minutes", type=float, help="start nothing new after so long; --resume goes on")
        sub.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
        sub.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
        sub.add_argument("--max-autotune", action="store_true", help="add torch.compile's max-autotune-no-cudagraphs")
        sub.add_argument("--seconds", type=float, help="of timing a case (1.5, quick 0.5, on the CPU 0.2)")
        sub.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
        sub.add_argument("--seed", type=int, help="of the accuracy suite's inputs; a fresh one unless given")
    for command in RECORD_COMMANDS:
        sub = commands.add_parser(command)
        sub.add_argument("file", type=Path, nargs="?", default=RECORDED)
        if command == "plot":
            sub.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
        elif command != "documents":
            sub.add_argument("--markdown", action="store_true")
    args = parser.parse_args(arguments)
    if getattr(args, "resume", False) and args.json is None:
        parser.error("--resume needs --json FILE")
    return args


def chosen_suites(args: argparse.Namespace) -> tuple[str, ...]:
    return SUITES if args.command == "all" else (args.command,)


def new_run(args: argparse.Namespace) -> Run:
    """Without rows, or what is to be resumed; ValueError where that is of another machine or other sources."""
    run = Run(describe(args.device), options={"suites": [], "steps": [], "quick": args.quick})
    if args.resume and args.json.exists():
        begun = Run.load(args.json)
        place = {name: value for name, value in begun.environment.items() if name != "clocks"}
        if place != run.environment or begun.options.get("quick") != args.quick or "steps" not in begun.options:
            raise ValueError(f"{args.json} can't be resumed: it is of another machine, other sources or other options")
        return begun
    run.options["seed"] = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    return run


def run_suites(args: argparse.Namespace, run: Run) -> int:
    """Adds the rows to the run; how many steps --minutes has left undone."""
    begin = time.monotonic()
    seconds = args.seconds or (0.2 if args.device.type != "cuda" else 0.5 if args.quick else 1.5)
    options = Options(
        device=args.device,
        quick=args.quick,
        compile=not args.no_compile,
        max_autotune=args.max_autotune,
        seconds=seconds,
        only=args.only,
        seed=run.options["seed"],
    )
    suites = chosen_suites(args)
    torch.manual_seed(0)
    run.options["suites"] = list(dict.fromkeys([*run.options["suites"], *suites]))
    run.options["seconds"] = seconds
    run.ceilings = run.ceilings or measure_ceilings(args.device, args.quick)
    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    took: dict[str, float] = run.options.setdefault("took", {})
    steps = [step for step in plan(suites, options) if step.name not in run.options["steps"]]
    done = 0
    with Progress(*columns, console=report.console(), transient=True) as progress:
        task = progress.add_task("bench", total=len(steps), now="")
        for suite, of_suite in groupby(steps, lambda step: step.suite):
            for step in of_suite:
                start = time.monotonic()
                if args.minutes and start - begin > 60 * args.minutes:
                    break
                progress.update(task, now=step.name)
                run.rows += step.run(run.ceilings)
                run.options["steps"].append(step.name)
                took[suite] = took.get(suite, 0.0) + time.monotonic() - start
                done += 1
                if args.json:
                    run.save(args.json)
                progress.advance(task)
            if suite in took:
                # at once: what comes later may be killed
                progress.console.print(f"{suite}: {took[suite]:.0f} s", highlight=False)
    if options.on_gpu:
        run.environment["clocks"] = clocks_under_load(args.device)
    if args.json:
        run.save(args.json)
    return len(steps) - done


def show_recorded(suites: tuple[str, ...]) -> None:
    out = report.console()
    if RECORDED.exists():
        out.rule("recorded on an H200")
        report.show(Run.load(RECORDED), out, suites)
    else:
        out.print("No H200 run is recorded (bench/results/h200.json).")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    out = report.console()
    if args.command in RECORD_COMMANDS:
        if not args.file.exists():
            print(f"no such file: {args.file}", file=sys.stderr)
            return 2
        run = Run.load(args.file)
        if args.command == "plot":
            from . import plots

            for path in plots.write(run, args.out):
                print(path)
        elif args.command == "documents":
            for path in documents.write(run):
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
        left_out = [suite for suite in chosen_suites(args) if suite in GPU_SUITES]
        if left_out:
            out.print(f"Left out, as they need a CUDA GPU: {', '.join(left_out)}.", highlight=False)
    try:
        run = new_run(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    left = run_suites(args, run)
    report.show(run, out)
    if args.device.type != "cuda":
        show_recorded(chosen_suites(args))
    elif args.command == "all" and not left:
        report.show_bars(run, out)
    wrong = [row for row in run.rows if row.variant in (OURS, OURS_COMPILED, SPLIT) and row.status != OK]
    for row in wrong:
        out.print(f"{row.case}: {row.status}: {row.detail}", style="bold red", markup=False)
    if left:
        out.print(f"{left} steps are left for --resume.", style="bold yellow", highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
