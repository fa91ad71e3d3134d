"""`shardcomm simulate`: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from shardcomm.cli.models import add_model
from shardcomm.cli.options import (
    DefaultsFormatter,
    check_outputs,
    memory,
    named,
    opened,
    picture,
    share,
    whole,
)
from shardcomm.cli.precision import add_precision, add_reduce_format
from shardcomm.cli.simulate.configurations import Outcome, outcomes
from shardcomm.cli.simulate.sweep_plot import draw as draw_sweep
from shardcomm.cli.timeline_plot import draw as draw_timeline
from shardcomm.planner.table import aligned, size
from shardcomm.schedule.strategy import STRATEGIES
from shardcomm.simulate.machine import shipped
from shardcomm.simulate.simulation import as_csv

_LINKS = ("memory", "host", "network")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "simulate",
        help="say how long a step would take on a machine that need not be there",
        description="Executes a model's schedule on a clock, for a machine whose figures a file has. It prints the "
        "time of a forward and a backward, how much of it is exposed communication, the bytes over each link and the "
        "peak of memory, for all strategies side by side or for one. The optimizer's step is not in the time, and "
        "activations are not in the memory.",
        formatter_class=DefaultsFormatter,
    )
    add_model(parser)
    add_precision(parser, "bf16")
    add_reduce_format(parser)
    add = parser.add_argument
    # fmt: off
    add("--machine", type=named, default="8xH100", metavar="NAME|FILE",
        help=f"the machine: {', '.join(shipped())} (by published figures), or a file of `shardcomm bench --fit FILE`")
    add("--ranks", type=whole(1, 2**20), default=8, help="number of ranks")
    add("--replicas", type=whole(1, 2**20),
        help="for hybrid_shard: how many times the ranks hold the model (default: once a host)")
    add("--strategy", choices=list(STRATEGIES), help="simulate this strategy only (default: all, side by side)")
    add("--batch", type=whole(1, 2**20), default=1, help="sequences of a rank in a step")
    add("--context", type=whole(1, 2**24), default=2048, help="tokens of a sequence")
    add("--recompute", action="store_true", help="recompute each block's forward in backward")
    add("--prefetch", type=whole(0, 10**4), help="how many units are gathered ahead (default: 1)")
    add("--backward-prefetch", type=whole(0, 10**4),
        help="how many are gathered ahead in backward (default: --prefetch)")
    add("--slots", type=whole(1, 10**4),
        help="number of full-size buffers (default: the larger prefetch depth, plus 1)")
    add("--reshard-after-forward", type=whole(2, 2**20), metavar="RANKS",
        help="how many ranks gather for backward among themselves, in strategies that reshard")
    add("--times", type=named, metavar="TRACE",
        help="take the times of computation from this trace of one rank, and not from FLOPs and the machine's rate")
    add("--stragglers", type=share, metavar="SIGMA",
        help="how much ranks differ in speed: the standard deviation, as a share of their time (default: 0)")
    add("--steps", type=whole(1, 10**4), help="with --stragglers: how many steps are drawn (default: 100)")
    add("--seed", type=whole(0, 2**31), help="with --stragglers: the seed of the draws (default: 0)")
    add("--memory", type=memory, metavar="SIZE",
        help="say which configuration is the fastest whose peak fits into this, such as 40GB or 80GiB")
    add("--sweep", action="store_true",
        help="simulate all strategies, prefetch depths from 0 to 2, doublings from one host up to --ranks, and --ranks")
    add("--trace", metavar="FILE",
        help="write the step as a trace, for `shardcomm trace` and Perfetto; needs --strategy")
    add("--json", metavar="FILE", help="write all figures to this file, too; - for stdout")
    add("--csv", metavar="FILE", help="write a line for each configuration to this file, too; - for stdout")
    add("--plot", type=picture, metavar="FILE",
        help="draw the step of --strategy or, with --sweep, tokens over ranks, into this file: .png, .svg or .pdf")
    # fmt: on
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command. Exit status: 0, or 2 for bad options."""
    _check(parser, args)
    try:
        found = list(outcomes(args))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    out = sys.stderr if "-" in (args.json, args.csv) else sys.stdout
    machine = found[0].simulation.machine
    print(
        f"{machine.name}, {machine.origin} figures; {args.dtype}, {found[0].tokens:,} tokens a rank",
        file=out,
    )
    if machine.origin == "published" and args.times is None:
        print(
            "published figures are peaks: real steps take longer; compare strategies by these times, or give --times",
            file=out,
        )
    print(file=out)
    print("\n".join(aligned(_table(found, with_p95=bool(args.stragglers)))), file=out)
    if args.strategy is None and "hybrid_shard" not in {e.simulation.plan.strategy for e in found}:
        print("  hybrid_shard: give --replicas", file=out)
    if args.sweep or args.memory is not None:
        limit = machine.memory_bytes if args.memory is None else args.memory
        print(f"\n  {_best_line(found, limit)}", file=out)
    _write(args, found)
    return 0


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    check_outputs(parser, args, "json", "csv", "trace", "plot")
    for option, swept in (
        ("strategy", "all strategies"),
        ("prefetch", "depths from 0 to 2"),
        ("backward-prefetch", "the same depth in forward and backward"),
    ):
        if args.sweep and getattr(args, option.replace("-", "_")) is not None:
            parser.error(f"--sweep and --{option} exclude each other: it simulates {swept}")
    for option in ("steps", "seed"):
        if args.stragglers is None and getattr(args, option) is not None:
            parser.error(f"--{option} is for --stragglers SIGMA, which is not given")
    one_step = "trace" if args.trace is not None else "plot" if args.plot is not None else None
    if one_step == "trace" and args.sweep:
        parser.error("--trace is of one step, and --sweep simulates many")
    if one_step is not None and not args.sweep and args.strategy is None:
        parser.error(f"--{one_step} shows one step; add --strategy")


def _table(found: Sequence[Outcome], *, with_p95: bool) -> list[list[str]]:
    links = [link for link in _LINKS if any(each.simulation.link_bytes.get(link) for each in found)]
    table = [
        [
            *("strategy", "ranks", "prefetch", "step"),
            *(["p95"] if with_p95 else []),
            *("compute", "exposed", "", "tokens/s/rank"),
            *(f"{link}/step" for link in links),
            "peak",
        ]
    ]
    for each in found:
        step = each.simulation
        exposed = step.exposed_s / step.step_s if step.step_s else 0.0
        table.append(
            [
                *(step.plan.strategy, str(step.plan.ranks), str(each.prefetch)),
                _duration(step.step_s),
                *([_duration(each.p95_s)] if with_p95 else []),
                *(_duration(step.compute_s), _duration(step.exposed_s), f"{exposed:.1%}"),
                f"{each.tokens_per_s:,.0f}",
                *(size(step.link_bytes.get(link, 0)) for link in links),
                size(step.plan.peak_bytes),
            ]
        )
    return table


def _best_line(found: Sequence[Outcome], limit: int) -> str:
    """Which configuration trains on the most tokens a second, of those that fit with the most ranks."""
    fitting = [each for each in found if each.simulation.plan.peak_bytes <= limit]
    if not fitting:
        least = min(each.simulation.plan.peak_bytes for each in found)
        return f"none fits into {size(limit)}; the smallest takes {size(least)}"
    best = max(fitting, key=lambda each: (each.simulation.plan.ranks, each.tokens_per_s))
    plan = best.simulation.plan
    return (
        f"fastest that fits into {size(limit)}, activations not counted: {plan.strategy} over {plan.ranks} ranks, "
        f"prefetch {best.prefetch}: {best.tokens_per_s:,.0f} tokens/s/rank, "
        f"{size(limit - plan.peak_bytes)} left"
    )


def _write(args: argparse.Namespace, found: Sequence[Outcome]) -> None:
    if args.json is not None:
        report = {
            "command": " ".join(["shardcomm", *sys.argv[1:]]),
            "configurations": [each.simulation.as_json() | each.figures() for each in found],
        }
        with opened(args.json) as file:
            file.write(json.dumps(report, indent=1) + "\n")
    if args.csv is not None:
        with opened(args.csv) as file:
            file.write(as_csv([each.figures() for each in found]))
    if args.trace is not None:
        replace(found[0].simulation.timeline(), tokens=found[0].tokens).save(args.trace)
    if args.plot is not None and args.sweep:
        draw_sweep(args.plot, found)
    elif args.plot is not None:
        draw_timeline(found[0].simulation.timeline(), args.plot)


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms"
