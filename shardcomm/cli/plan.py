"""`shardcomm plan`: the memory and communication that a model takes on each rank, before anything is allocated."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from shardcomm.cli.models import add_model, model_of
from shardcomm.cli.options import (
    DefaultsFormatter,
    check_outputs,
    memory,
    named,
    opened,
    picture,
    whole,
)
from shardcomm.cli.precision import add_precision, precision_of
from shardcomm.cli.schedule_plot import draw
from shardcomm.planner.planner import MemoryPlan
from shardcomm.planner.rank_bytes import OPTIMIZERS
from shardcomm.planner.table import aligned, size
from shardcomm.schedule.strategy import STRATEGIES
from shardcomm.trace.timeline import Timeline

_MOST_DRAWN_UNITS = 9  # a picture of more could not be read


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="say how many bytes a model takes on each rank, before anything is allocated",
        description="Prints the bytes that each rank will hold and move: for all strategies side by side, or for one "
        "of them unit by unit. Activations are not counted, since they depend on batch and context. 1 GB is 1e9 bytes.",
        formatter_class=DefaultsFormatter,
    )
    add_model(parser)
    parser.add_argument("--context", type=whole(1, 2**24),
                        help="tokens of a sequence of gpt, which has a position for each (default: 128)")  # fmt: skip
    parser.add_argument("--ranks", type=whole(1, 2**20), default=4, help="number of ranks")
    parser.add_argument("--replicas", type=whole(1, 2**20),
                        help="for hybrid_shard: how many times the ranks hold the model")  # fmt: skip
    parser.add_argument("--strategy", choices=list(STRATEGIES),
                        help="plan this strategy only, unit by unit (default: all, side by side)")  # fmt: skip
    add_precision(parser, "fp32")
    parser.add_argument("--cpu-offload", action="store_true",
                        help="keep parameters, gradients and optimizer state in host memory")  # fmt: skip
    parser.add_argument("--reshard-after-forward", type=whole(2, 2**20), metavar="RANKS",
                        help="how many ranks gather for backward among themselves, with full_shard or the strategy "
                        "given")  # fmt: skip
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw",
                        help="torch's optimizer, whose state is counted")  # fmt: skip
    parser.add_argument("--prefetch", type=whole(0, 10**4), default=1,
                        help="how many units are gathered ahead")  # fmt: skip
    parser.add_argument("--backward-prefetch", type=whole(0, 10**4),
                        help="how many are gathered ahead in backward (default: --prefetch)")  # fmt: skip
    parser.add_argument("--slots", type=whole(1, 10**4),
                        help="number of full-size buffers (default: the larger prefetch depth, plus 1)")  # fmt: skip
    parser.add_argument("--memory", type=memory, metavar="SIZE",
                        help="a device's memory, such as 40GB or 80GiB: say whether the model fits")  # fmt: skip
    parser.add_argument("--json", metavar="FILE",
                        help="write all figures to this file, too; - for stdout")  # fmt: skip
    parser.add_argument("--plot", type=picture, metavar="FILE",
                        help="draw the schedules into this file: .png, .svg or .pdf")  # fmt: skip
    parser.add_argument("--chakra", type=named, metavar="FOLDER",
                        help="write a step of --strategy as Chakra execution traces, one for each rank, into this new "
                        "folder; with --tokens or --trace")  # fmt: skip
    parser.add_argument("--tokens", type=whole(1, 2**31 - 1), metavar="N",
                        help="for --chakra: how many tokens a rank computes in a step")  # fmt: skip
    parser.add_argument("--trace", type=named, metavar="FILE",
                        help="for --chakra: take the step's times from this trace of `shardcomm train`")  # fmt: skip
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command. Exit status: 0, or 2 for bad options."""
    check_outputs(parser, args, "json", "plot")
    for option in ("tokens", "trace"):
        if args.chakra is None and getattr(args, option) is not None:
            parser.error(f"--{option} is for --chakra FOLDER, which is not given")
    try:
        plans = _plans(args)
        if args.chakra is not None:
            _write_chakra(args, plans)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    if args.plot is not None:
        units = len(plans[0].units)
        if units > _MOST_DRAWN_UNITS:
            parser.error(
                f"--plot draws up to {_MOST_DRAWN_UNITS} units, and this model has {units}; add --layers 4"
            )
        draw(args.plot, {plan.strategy: plan.schedule for plan in plans})
    out = sys.stderr if args.json == "-" else sys.stdout
    numel = sum(unit.numel for unit in plans[0].units)
    print(
        f"{args.model or 'model'}: {numel:,} parameters, {args.dtype}, {args.optimizer}\n", file=out
    )
    print(plans[0] if args.strategy else _comparison(plans), file=out)
    if args.strategy is None and args.replicas is None:
        print("  hybrid_shard: give --replicas", file=out)
    if args.memory is not None:
        print("\n".join(["", *_fit_lines(plans, args.memory)]), file=out)
    if args.json is not None:
        _write_json(args.json, plans, args.memory)
    return 0


def _plans(args: argparse.Namespace) -> list[MemoryPlan]:
    """A plan for each strategy; for hybrid_shard only if the number of replicas is given."""
    if args.context is not None and args.model != "gpt":
        raise ValueError(
            "--context is for --model gpt; parameters of the other models do not depend on it"
        )
    model = model_of(args, args.context or 128)
    strategies = [args.strategy]
    if args.strategy is None:
        strategies = ["no_shard", "shard_grad_op", "full_shard"]
        strategies += ["hybrid_shard"] if args.replicas is not None else []
    alone = args.strategy is not None
    return [
        MemoryPlan.of(
            model,
            args.ranks,
            strategy=strategy,
            replicas=args.replicas if alone or strategy == "hybrid_shard" else None,
            mixed_precision=precision_of(args),
            prefetch=args.prefetch,
            backward_prefetch=args.backward_prefetch,
            slots=args.slots,
            cpu_offload=args.cpu_offload,
            reshard_after_forward=args.reshard_after_forward
            if alone or strategy == "full_shard"
            else None,
            optimizer=args.optimizer,
        )
        for strategy in strategies
    ]


def _comparison(plans: Sequence[MemoryPlan]) -> str:
    """A table with a line for each plan."""
    offloaded = plans[0].host_bytes > 0
    table = [
        [
            f"of each of {plans[0].ranks} ranks",
            *("parameters", "gradients", "optimizer", "buffers", "full grads"),
            *(["on the host", "on the device"] if offloaded else ["peak"]),
            *("gathered/step", "reduced/step"),
        ]
    ]
    for plan in plans:
        held = plan.footprint
        figures = [
            held.parameter_bytes,
            held.gradient_bytes,
            plan.optimizer_bytes,
            plan.buffer_bytes,
            plan.full_gradient_bytes,
            *([plan.host_bytes] if offloaded else []),
            plan.peak_bytes,
            plan.gathered_bytes,
            plan.reduced_bytes,
        ]
        table.append([plan.strategy, *map(size, figures)])
    return "\n".join(aligned(table))


def _fit_lines(plans: Sequence[MemoryPlan], memory: int) -> list[str]:
    """A line for each plan: how much of a device is left for activations, or is missing, and what the host needs."""
    offloaded = plans[0].host_bytes > 0
    lines = [f"  fits on {size(memory)}{' of a device' if offloaded else ''}?"]
    for plan in plans:
        left = memory - plan.peak_bytes
        fits = (
            f"yes, {size(left)} left for activations"
            if left >= 0
            else f"no, {size(-left)} too much"
        )
        host = f"; {size(plan.host_bytes)} of its host for each rank" if offloaded else ""
        lines.append(f"    {plan.strategy}: {fits}{host}")
    if offloaded:
        lines.append(
            "  where the host's memory is pinned, torch rounds each block up to a power of two"
        )
    return lines


def _write_json(path: str, plans: Sequence[MemoryPlan], memory: int | None) -> None:
    fits = [{} if memory is None else {"fits": plan.peak_bytes <= memory} for plan in plans]
    report = {
        "command": " ".join(["shardcomm", *sys.argv[1:]]),
        "memory_bytes": memory,
        "plans": [plan.as_json() | fit for plan, fit in zip(plans, fits, strict=True)],
    }
    with opened(path) as file:
        file.write(json.dumps(report, indent=1) + "\n")


def _write_chakra(args: argparse.Namespace, plans: Sequence[MemoryPlan]) -> None:
    from shardcomm.interop import chakra  # noqa: PLC0415  (needs an extra)

    if args.strategy is None:
        raise ValueError("--chakra needs --strategy: a folder holds the traces of one")
    if args.tokens is None and args.trace is None:
        raise ValueError("--chakra needs --tokens N, of which operations follow, or --trace FILE")
    timeline = None if args.trace is None else Timeline.load(args.trace)
    try:
        chakra.write_step(plans[0], args.chakra, tokens=args.tokens, timeline=timeline)
    except ValueError as error:
        raise ValueError(f"--chakra: {error}") from error
