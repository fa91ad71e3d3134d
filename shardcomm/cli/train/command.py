"""`shardcomm train`: its options, and how its ranks are started."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from shardcomm._C import CommError, CudaError, cuda_status
from shardcomm.checkpoint.folders import check_directory
from shardcomm.checkpoint.manifest import CheckpointError
from shardcomm.cli.models import check_width
from shardcomm.cli.options import DefaultsFormatter, check_outputs, launched_for, positive, whole
from shardcomm.cli.train.job import MAX_TRACED_STEPS, WARM_UP_STEPS, Result, TrainOptions, train
from shardcomm.cli.train.progress import Progress
from shardcomm.cli.train.report import table, write_json
from shardcomm.cli.train.text import Corpus, read_text
from shardcomm.comm import nccl
from shardcomm.comm.words import DEADLINE_S
from shardcomm.process.launch import RankError, launch
from shardcomm.process.stack_dumps import enable_where_free
from shardcomm.schedule.strategy import STRATEGIES
from shardcomm.trace.timeline import Timeline

_SAVE_EVERY = 50


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "train",
        help="train a byte-level GPT on real text, fully sharded",
        description="Trains a byte-level GPT on real text. Parameters, gradients and optimizer state are sharded over "
        "local processes or, under torchrun, mpirun or srun, over the ranks that the launcher starts.",
        formatter_class=DefaultsFormatter,
    )
    number = whole(1, 10**6)
    parser.add_argument("--ranks", type=whole(1, 1024),
                        help="number of local processes (default: one for each GPU, or 2 without; under a launcher, "
                        "its own ranks)")  # fmt: skip
    parser.add_argument("--steps", type=number, default=150, help="number of optimizer steps")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0,
                        help="seed of weights, data and sample")  # fmt: skip
    parser.add_argument("--width", type=whole(1, 2**16), default=256,
                        help="width of the residual stream")  # fmt: skip
    parser.add_argument("--layers", type=number, default=6, help="number of transformer blocks")
    parser.add_argument("--batch", type=number, default=4, help="sequences per rank and step")
    parser.add_argument("--context", type=number, default=128, help="bytes per sequence")
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="full_shard",
                        help="how the model is laid over the ranks")  # fmt: skip
    parser.add_argument("--replicas", type=whole(1, 1024), metavar="N",
                        help="for hybrid_shard: how many groups of ranks hold the whole model each")  # fmt: skip
    parser.add_argument("--cpu-offload", action="store_true",
                        help="keep parameters, gradients and optimizer state in host memory")  # fmt: skip
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32",
                        help="dtype to compute and communicate in; shards stay fp32")  # fmt: skip
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto",
                        help="auto takes a GPU for each rank if there are so many, else the CPU")  # fmt: skip
    parser.add_argument("--lr", type=positive, default=1e-3, help="AdamW's learning rate")
    parser.add_argument("--text", metavar="PATH", help="train on this file, or on the files of this folder, instead "
                        "of the Python sources of the standard library")  # fmt: skip
    parser.add_argument("--deadline", type=positive, default=DEADLINE_S, metavar="SECONDS",
                        help="longest wait for another rank")  # fmt: skip
    parser.add_argument("--checkpoint", metavar="DIR", help="save model, optimizer and progress in this folder, which "
                        "is for one run at a time; the newest two checkpoints are kept")  # fmt: skip
    parser.add_argument("--save-every", type=number, metavar="N",
                        help="steps between checkpoints, which are written while training goes on; there is one after "
                        f"the last step, too (default: {_SAVE_EVERY})")  # fmt: skip
    parser.add_argument("--resume", action="store_true",
                        help="go on from the newest checkpoint in DIR, if there is one")  # fmt: skip
    parser.add_argument("--json", metavar="FILE",
                        help="write the result to this file, too; - for stdout")  # fmt: skip
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write to this file when every rank computed, gathered, reduced and waited, for https://ui.perfetto.dev "
        f"and `shardcomm trace`; it has all steps but the first {WARM_UP_STEPS}, at most the last {MAX_TRACED_STEPS}",
    )
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command. Exit status: 0, 1 if a rank failed, or 2 for bad options."""
    own = launched_for(parser, args.ranks)
    ranks = own.size if own.launcher else args.ranks or _usual_ranks(args.device)
    _check_replicas(parser, args, ranks)
    options = options_of(args)
    if own.rank == 0:
        check_outputs(parser, args, "json", "trace")
    try:
        check_width(args.width)
        text = read_text(args.text)
        Corpus(text, args.context)
        _check_checkpoint(options, args, text)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--text is {args.text!r}: {error}")
    if args.device == "cuda" and not cuda_status().available:
        parser.error(f"--device is cuda, but {cuda_status().reason}")
    enable_where_free()  # also in the process that launches ranks, whose pid users find first
    try:
        result, timeline = train(options) if own.launcher else launch(train, ranks, (options,))[0]
    except (RankError, CommError, CudaError, CheckpointError) as error:
        print(f"\nshardcomm train: {error}", file=sys.stderr)  # below the progress bar
        return 1
    return _report(args.json, options, result, timeline) if own.rank == 0 else 0


def options_of(args: argparse.Namespace) -> TrainOptions:
    """The options that the ranks must know."""
    return TrainOptions(
        steps=args.steps,
        seed=args.seed,
        width=args.width,
        layers=args.layers,
        batch=args.batch,
        context=args.context,
        strategy=args.strategy,
        replicas=args.replicas,
        cpu_offload=args.cpu_offload,
        precision=args.precision,
        lr=args.lr,
        text=args.text,
        device=args.device,
        deadline_s=args.deadline,
        checkpoint=args.checkpoint,
        save_every=args.save_every or _SAVE_EVERY,
        trace=args.trace,
    )


def _report(
    json_path: str | None, options: TrainOptions, result: Result, timeline: Timeline | None
) -> int:
    print(table(result), file=sys.stderr if json_path == "-" else sys.stdout)
    try:
        option = f"--json {json_path}"
        if json_path is not None:
            write_json(json_path, options, result)
        option = f"--trace {options.trace}"
        if options.trace is not None and timeline is not None:
            replace(timeline, tokens=options.batch * options.context).save(options.trace)
    except OSError as error:
        print(f"shardcomm train: {option}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _usual_ranks(device: str) -> int:
    gpus = 0
    if device != "cpu" and nccl.status().available:
        gpus = cuda_status().devices
    return gpus or 2


def _check_replicas(parser: argparse.ArgumentParser, args: argparse.Namespace, ranks: int) -> None:
    hybrid = STRATEGIES[args.strategy].hybrid
    if hybrid and args.replicas is None:
        parser.error(f"--strategy is {args.strategy}, which needs --replicas N")
    if args.replicas is not None and not hybrid:
        parser.error(
            f"--replicas is {args.replicas}, which --strategy {args.strategy} does not take"
        )
    if ranks % (args.replicas or 1):
        parser.error(f"--replicas is {args.replicas}, which does not divide the {ranks} ranks")


def _check_checkpoint(options: TrainOptions, args: argparse.Namespace, text: bytes) -> None:
    """ValueError if the run can neither begin nor go on in the folder of --checkpoint."""
    if options.checkpoint is None:
        for option, given in (("resume", args.resume), ("save-every", args.save_every)):
            if given:
                raise ValueError(
                    f"--{option} needs the folder of the checkpoints: --checkpoint DIR"
                )
        return
    given = f"--checkpoint is {options.checkpoint!r}"
    try:
        saved = Progress.latest(check_directory(options.checkpoint))
    except (ValueError, OSError) as error:
        raise ValueError(f"{given}: {error}") from error
    if saved is None:
        return
    given = f"{given}, where there is a checkpoint of step {saved.step}"
    if not args.resume:
        raise ValueError(f"{given}; add --resume to go on from it, or name another folder")
    if differences := saved.differences(options.identity(text)):
        raise ValueError(f"{given} of another run: {'; '.join(differences)}")
    if saved.step > options.steps:
        raise ValueError(f"{given}; --steps is {options.steps}; it must be at least as many")
