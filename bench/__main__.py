"""Compares cutlass_bn with PyTorch, or shows what a recorded comparison says.

python -m bench workloads --quick           the two workloads, about a minute
python -m bench cpu                         the CPU path, on two threads
python -m bench all --json results.json     every suite
python -m bench all --json results.json --resume --minutes 9    in pieces, until nothing is left
python -m bench show|plot|readme [FILE]     the recorded H200 run unless a file is named
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import ROOT, report
from .cases import Options
from .records import OK, OURS, OURS_COMPILED, RECORDED, SPLIT, Run, describe
from .suites import SUITES, plan
from .suites import run as run_one
from .timing import measure_ceilings


def parse(arguments: list[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench", description=__doc__, formatter_class=layout)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, recorded = (argparse.ArgumentParser(add_help=False) for _ in range(2))
    add = measuring.add_argument
    add("--quick", action="store_true", help="fewer cases and rounds")
    add("--json", type=Path, metavar="FILE", help="records the run; rewritten after every case")
    add("--resume", action="store_true", help="keep what the --json FILE holds, measure the rest")
    add("--minutes", type=float, help="start nothing new after so long; --resume goes on")
    add("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-compile", action="store_true", help="leave torch.compile out")
    add("--seconds", type=float, help="of timing a case (1.5, quick 0.5, on the CPU 0.2)")
    add("--only", default="", metavar="TEXT", help="cases whose name holds this")
    add("--seed", type=int, help="of the accuracy suite's inputs; a fresh one unless given")
    add("--summary", action="store_true", help="show one line a case")
    recorded.add_argument("file", type=Path, nargs="?", default=RECORDED)
    for suite in (*SUITES, "all"):
        commands.add_parser(suite, parents=[measuring])
    show = commands.add_parser("show", parents=[recorded], help="all tables")
    show.add_argument("--markdown", action="store_true")
    plot = commands.add_parser("plot", parents=[recorded], help="charts, as PNG files")
    plot.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    commands.add_parser("readme", parents=[recorded], help="writes README's table")
    args = parser.parse_args(arguments)
    if getattr(args, "resume", False) and args.json is None:
        parser.error("--resume needs --json FILE")
    return args


def recorded(args: argparse.Namespace) -> None:
    run = Run.load(args.file)
    if args.command == "readme":
        report.write_readme(run)
    elif args.command == "plot":
        from . import plots

        for suite in ("models", "workloads", "sweep"):
            if run.cases(suite):
                plots.write(run, suite, args.out / f"{suite}.png")
    elif args.markdown:
        print(report.markdown(run, report.tables(run)))
    else:
        report.show(run, report.console(), report.tables(run))


def new_run(args: argparse.Namespace) -> Run:
    """Without rows, or what is to be resumed; ValueError where that is of another place."""
    place = describe(args.device)
    if args.resume and args.json.exists():
        run = Run.load(args.json)
        if run.environment != place or run.options.get("quick") != args.quick:
            what = "another machine, other sources or other options"
            raise ValueError(f"{args.json} can't be resumed: it is of {what}")
        return run
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    return Run(place, options={"steps": [], "quick": args.quick, "seed": seed, "took": {}})


def measure(args: argparse.Namespace, suites: list[str], run: Run) -> int:
    """Adds the rows to the run; how many steps --minutes has left undone."""
    begin = time.monotonic()
    torch.manual_seed(0)
    run.ceilings = run.ceilings or measure_ceilings(args.device, args.quick)
    seed, done, took = (run.options[name] for name in ("seed", "steps", "took"))
    times = {"compile": not args.no_compile, "seconds": args.seconds, "only": args.only}
    options = Options(args.device, args.quick, **times, seed=seed, ceilings=run.ceilings)
    steps = [(suite, item) for suite, item in plan(suites, options) if item.name not in done]
    columns = MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=report.console(), transient=True) as progress:
        task = progress.add_task("", total=len(steps))
        for count, (suite, item) in enumerate(steps):
            start = time.monotonic()
            if args.minutes and start - begin > 60 * args.minutes:
                return len(steps) - count
            progress.update(task, completed=count, description=item.name)
            run.rows += run_one(suite, item, options)
            done.append(item.name)
            took[suite] = took.get(suite, 0.0) + time.monotonic() - start
            if args.json:
                run.save(args.json)
    return 0


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if "file" in args:
            recorded(args)
            return 0
        run = new_run(args)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    suites, out = list(SUITES) if args.command == "all" else [args.command], report.console()
    left = measure(args, suites, run)
    summary = report.summary(run, "measured here, ms", run.cases())
    report.show(run, out, [summary] if args.summary else report.tables(run))
    if not run.on_gpu and "workloads" in suites:
        out.print(report.as_text(report.readme_table(Run.load(RECORDED))))
    if skipped := [suite for suite in suites if not (run.on_gpu or SUITES[suite].on_cpu)]:
        out.print(f"Left out, as they need a CUDA GPU: {', '.join(skipped)}.")
    ours = (OURS, OURS_COMPILED, SPLIT)
    wrong = [row for row in run.rows if row.variant in ours and row.status != OK]
    for row in wrong:
        out.print(f"{row.case}: {row.status}: {row.detail}", style="bold red", markup=False)
    if left:
        out.print(f"{left} steps are left for --resume.", style="bold yellow")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
