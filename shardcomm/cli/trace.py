"""`shardcomm trace`: sums up a timeline as a table, and draws it as a picture."""

from __future__ import annotations

import argparse
import sys

from shardcomm.cli.options import check_outputs, named, picture, whole
from shardcomm.cli.timeline_plot import draw
from shardcomm.trace.timeline import Figures, Timeline


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "trace",
        help="sum up a trace, or draw it",
        description="Sums up a trace that `shardcomm train --trace FILE` wrote. For each rank it prints the time of "
        "computation, of exposed communication (how long computation waited for it), of gathers and of reduces.",
    )
    parser.add_argument("file", type=named, metavar="FILE", help="the trace")
    parser.add_argument(
        "--plot", type=picture, metavar="PICTURE", help="draw one step into this file: .png, .svg or .pdf"
    )  # fmt: skip
    parser.add_argument(
        "--step", type=whole(0, 2**31), metavar="N",
        help="sum up and draw this step alone (default: sum up all, and draw one of median duration)"
    )  # fmt: skip
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command. Exit status: 0, 1 if FILE is no trace or has no such step, or 2 for bad options."""
    check_outputs(parser, args, "plot")
    try:
        timeline = Timeline.load(args.file)
        if args.step is not None:
            timeline = _only(timeline, args.step)
        if args.plot is not None:
            several = args.step is None and timeline.steps()
            draw(timeline.only(timeline.median_step()) if several else timeline, args.plot)
        shown = table(timeline)
    except OSError as error:
        print(f"shardcomm trace: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"shardcomm trace: {error}", file=sys.stderr)
        return 1
    print(shown)
    return 0


def _only(timeline: Timeline, number: int) -> Timeline:
    steps = timeline.steps()
    if f"step {number}" not in steps:
        there_is = f"{steps[0]} to {steps[-1]}" if steps else "no steps in it"
        raise ValueError(f"--step is {number}; the trace has {there_is}")
    return timeline.only(f"step {number}")


def table(timeline: Timeline) -> str:
    """A table with a line for each rank: milliseconds and MiB, per step if the trace has steps."""
    figures = timeline.figures()
    steps = figures[0].steps
    rows = [
        ("rank", "time", "compute", "exposed", "", "gather", "reduce", "gathered", "reduced", "hidden"),
        *map(_row, figures),
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    per = f"per step, mean of {steps}" if steps else "in all; no steps are marked"
    paths = ", ".join(f"{what} by {path}" for what, path in timeline.ranks[0].paths.items())
    return "\n".join(
        [
            *lines,
            "",
            f"times     {per}; time = compute + exposed communication",
            "hidden    part of the time of gathers and reduces in which computation did not wait",
            f"paths     {paths or 'not recorded'}",
            f"clock     {timeline.clock}",
        ]
    )


def _row(of: Figures) -> tuple[str, ...]:
    per = max(1, of.steps)

    def ms(seconds: float) -> str:
        return f"{seconds / per * 1e3:.1f} ms"

    def mib(nbytes: int) -> str:
        return f"{nbytes / per / 2**20:.2f} MiB"

    share = of.exposed_s / of.total_s if of.total_s else 0.0
    return (
        str(of.rank), ms(of.total_s), ms(of.compute_s), ms(of.exposed_s), f"{share:.1%}",
        ms(of.gather_s), ms(of.reduce_s), mib(of.gathered_bytes), mib(of.reduced_bytes),
        f"{of.hidden:.0%}",
    )  # fmt: skip
