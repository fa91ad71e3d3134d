"""`shardcomm bench`: its options, how its ranks are started, and what is made of the results."""

from __future__ import annotations

import argparse
import math
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shardcomm._C import CommError, CudaError, cuda_status
from shardcomm.arguments.dtype import FLOATS
from shardcomm.cli.bench import compare
from shardcomm.cli.bench.driver import benchmark
from shardcomm.cli.bench.files import write_csv, write_json
from shardcomm.cli.bench.layers import LAYER_OPERATIONS
from shardcomm.cli.bench.machine import measured_machine
from shardcomm.cli.bench.network import measured_hosts
from shardcomm.cli.bench.operations import OPERATIONS
from shardcomm.cli.bench.options import (
    DEFAULT_SIZE,
    DTYPES,
    BenchOptions,
    Sizes,
    layers,
    size_bytes,
    step_bytes,
)
from shardcomm.cli.bench.plot import write_plot
from shardcomm.cli.bench.results import Results
from shardcomm.cli.bench.transports import TRANSPORTS
from shardcomm.cli.options import (
    DefaultsFormatter,
    check_outputs,
    launched_for,
    picture,
    positive,
    whole,
)
from shardcomm.comm.operands import RED_OPS
from shardcomm.meeting.launchers import Launched
from shardcomm.models.shapes import SHAPES
from shardcomm.process.launch import RankError, launch
from shardcomm.process.stack_dumps import enable_where_free

# The memory that a rank needs, in units of the size: buffers, the copy that is the limit, random inputs and the
# expected result.
_BUFFERS = 9


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure collectives, and what a layer costs, as nccl-tests does",
        description="Measures collectives between local processes or, under torchrun, mpirun or srun, between the "
        "ranks that the launcher starts. The options of one letter and the columns are those of nccl-tests, and mean "
        "the same. Sizes are total bytes.",
        formatter_class=DefaultsFormatter,
    )
    count, switch = whole(1, 10**6), whole(0, 1)
    operations = _some_of("operation", [*OPERATIONS, *LAYER_OPERATIONS])
    add = parser.add_argument
    # fmt: off
    add("--op", type=operations, default="all_gather,reduce_scatter", metavar="OP,...",
        help=f"the operations: {', '.join(OPERATIONS)} on sizes; {', '.join(LAYER_OPERATIONS)} on layers")
    add("--transport", type=_some_of("transport", TRANSPORTS), default="shm", metavar="NAME,...",
        help=f"the transports: {', '.join(TRANSPORTS)}; those that cannot be used are skipped")
    add("--ranks", type=whole(1, 1024), metavar="N",
        help="number of local processes (default: 2; under a launcher, its own ranks)")
    add("--shapes", type=layers, metavar="NAME,...",
        help=f"the layers: a block of {' or '.join(SHAPES)}, or a JSON file of one layer's names and shapes (default: "
        "gpt2)")
    add("-b", type=size_bytes, default=DEFAULT_SIZE, metavar="SIZE", help="first size")
    add("-e", type=size_bytes, default=DEFAULT_SIZE, metavar="SIZE", help="last size")
    add("-i", type=step_bytes, default="1M", metavar="SIZE", help="step from one size to the next")
    add("-f", type=whole(1, 1 << 20), default=1, metavar="N",
        help="factor from one size to the next, instead of -i; 1 for none")
    add("-n", type=count, default=20, metavar="N", help="number of iterations")
    add("-w", type=whole(0, 10**6), default=1, metavar="N",
        help="warm-up operations before each timing; at least 1 is made")
    add("-m", type=count, default=1, metavar="N", help="operations in an iteration")
    add("-c", type=whole(0, 1000), default=1, metavar="N", help="checked operations for each figure")
    add("-o", choices=list(RED_OPS), help="reduction (default: sum)")
    add("-d", choices=list(DTYPES), default="float", help="type of the elements")
    add("-a", type=whole(0, 3), default=1, metavar="N",
        help="which time is printed: 0 rank 0's, 1 the mean of all ranks, 2 the least, 3 the largest")
    add("-C", type=switch, default=0, metavar="0|1", help="1: print the time until the host is free again")
    add("-G", type=whole(0, 10**6), default=0, metavar="N",
        help="launch a CUDA graph of all iterations so many times; 0 for no graph")
    add("-R", type=switch, default=0, metavar="0|1",
        help="1: put buffers in communication memory (Communicator.allocate)")
    add("-I", action="store_true", help="print spreads over single iterations")
    add("-T", type=positive, default=60.0, metavar="SECONDS", help="longest wait for another rank")
    add("-J", "--json", metavar="FILE", help="write the results to this file, too; - for stdout")
    add("--csv", metavar="FILE", help="write the figures to this file, too; - for stdout")
    add("--plot", type=picture, metavar="FILE", help="draw busbw over size into this file: .png, .svg or .pdf")
    add("--fit", metavar="FILE",
        help="measure this machine's cores and memory instead and, under a launcher, the network between its hosts; "
        "rank 0 writes the file for `shardcomm simulate --machine FILE`")
    add("--compare", nargs=2, metavar=("A", "B"), help="measure nothing; compare two --json files")
    add("--tolerance", type=positive, default=0.1, metavar="SHARE",
        help="with --compare: exit with 1 if B is slower by more than this share")
    # fmt: on
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command.

    Exit status: 0; 1 if a result was wrong, a rank failed or B is slower than A; 2 for bad options.
    """
    if args.compare:
        _refuse_others(parser, args, "compare", "tolerance")
        return _compare(parser, args)
    if args.tolerance != parser.get_default("tolerance"):
        parser.error("--tolerance is for --compare A B, which is not given")
    if args.fit is not None:
        _refuse_others(parser, args, "fit")
        return _fit(parser, args)
    own = launched_for(parser, args.ranks)
    options = _options(parser, args, own)
    if own.rank == 0:
        check_outputs(parser, args, "json", "csv", "plot")
    enable_where_free()  # as in `shardcomm train`
    try:
        in_ranks = partial(launch, benchmark, options.ranks, (options,))
        results = benchmark(options) if own.launcher else in_ranks()[0]
    except (RankError, CommError, CudaError) as error:
        if _has_no_reader(2 if options.to_stderr else 1):
            raise BrokenPipeError from error
        print(f"\nshardcomm bench: {error}", file=sys.stderr)  # below the progress bar
        return 1
    if own.rank > 0:
        return 0
    return _report(args, options, results)


def _has_no_reader(fd: int) -> bool:
    """Whether `fd` is a pipe that is read no more. A rank has written into it, and this process perhaps never."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _refuse_others(parser: argparse.ArgumentParser, args: argparse.Namespace, *used: str) -> None:
    """Refuses options beside those that are `used`, the first of which says what the command does instead."""
    defaults = vars(parser.parse_args([]))
    for name, value in vars(args).items():
        if name not in used and value != defaults.get(name, value):
            option = f"-{name}" if len(name) == 1 else f"--{name}"
            parser.error(
                f"{option} is not for --{used[0]}, which does without it; leave one of them out"
            )


def _options(
    parser: argparse.ArgumentParser, args: argparse.Namespace, own: Launched
) -> BenchOptions:
    try:
        sizes = Sizes(args.b, args.e, args.i, args.f)
    except ValueError as error:
        parser.error(str(error))
    ranks = own.size if own.launcher else args.ranks or 2
    on_layers = [name for name in args.op if name in LAYER_OPERATIONS]
    on_sizes = [OPERATIONS[name] for name in args.op if name in OPERATIONS]
    if on_layers and DTYPES[args.d] not in FLOATS:
        takes = f"take{'s' * (len(on_layers) == 1)} float, half and bfloat16"
        parser.error(f"-d is {args.d}; {', '.join(on_layers)} {takes}")
    if args.shapes is not None and not on_layers:
        parser.error(f"--shapes is for --op {', '.join(LAYER_OPERATIONS)}, none of which is given")
    if args.o is not None and not any(operation.reduces for operation in on_sizes):
        reducing = [operation.name for operation in OPERATIONS.values() if operation.reduces]
        parser.error(f"-o is for --op {', '.join(reducing)}, none of which is given")
    for operation in on_sizes:
        least, last = operation.least_bytes(DTYPES[args.d], ranks), sizes.all()[-1]
        if last < least:
            parser.error(
                f"the sizes from -b to -e go up to {last} bytes; {operation.name} of {ranks} ranks needs at least "
                f"{least}"
            )
    if args.G and not cuda_status().available:
        parser.error(f"-G is {args.G}, but a CUDA graph needs a GPU: {cuda_status().reason}")
    if args.G and args.I:
        parser.error("-G and -I exclude each other: in a graph no iteration is timed by itself")
    options = BenchOptions(
        operations=args.op,
        transports=args.transport,
        sizes=sizes,
        layers=layers("gpt2") if args.shapes is None else args.shapes,
        dtype=args.d,
        redop=args.o or "sum",
        iterations=args.n,
        warmups=max(1, args.w),  # the first call makes what later ones use
        aggregate=args.m,
        checks=args.c,
        average=args.a,
        cpu_time=bool(args.C),
        graph_launches=args.G,
        communication_memory=bool(args.R),
        statistics=args.I,
        deadline_s=args.T,
        ranks=ranks,
        to_stderr="-" in (args.json, args.csv),
    )
    _check_memory(parser, options, own.local_size or options.ranks)
    return options


def _check_memory(parser: argparse.ArgumentParser, options: BenchOptions, ranks: int) -> None:
    """Refuses options with which `ranks` ranks would drive the machine out of memory."""
    largest = options.sizes.last if set(options.operations) & set(OPERATIONS) else 0
    if set(options.operations) & set(LAYER_OPERATIONS):
        numel = (sum(map(math.prod, layer.shapes.values())) for layer in options.layers)
        largest = max(largest, 4 * max(numel))
    wanted, there = _BUFFERS * largest * ranks, _available_bytes()
    if wanted > there:
        parser.error(
            f"{ranks} ranks need about {wanted / 2**30:.1f} GiB for a size of {largest / 2**20:.0f} MiB, this host has "
            f"{there / 2**30:.1f} GiB; take a smaller -e, another of --shapes, or fewer ranks"
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def _report(args: argparse.Namespace, options: BenchOptions, results: Results) -> int:
    try:
        if args.json is not None:
            write_json(args.json, options, results)
        if args.csv is not None:
            write_csv(args.csv, results)
        if args.plot is not None:
            write_plot(args.plot, results)
    except OSError as error:
        print(f"shardcomm bench: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if not any(section.rows for section in results.sections):
        print("shardcomm bench: nothing was measured; see what was skipped", file=sys.stderr)
        return 1
    if results.wrong:
        print(f"shardcomm bench: {results.wrong} elements were wrong", file=sys.stderr)
    return 1 if results.wrong else 0


def _compare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        changes = compare.compare(*map(compare.read, args.compare))
    except OSError as error:
        parser.error(f"--compare: {error.filename}: {error.strerror}")
    except ValueError as error:
        parser.error(f"--compare: {error}")
    print(compare.screen(changes, args.tolerance))
    return int(any(change.ratio > 1 + args.tolerance for change in changes))


def _fit(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    own = launched_for(parser, None)
    if own.rank == 0:
        check_outputs(parser, args, "fit")
    path: str = args.fit
    measured = measured_hosts if own.launcher else measured_machine
    try:
        machine = measured(Path(path).stem)
    except ValueError as error:
        parser.error(f"--fit: {error}")
    except (RankError, CommError) as error:
        print(f"shardcomm bench: {error}", file=sys.stderr)
        return 1
    if machine is None:
        return 0
    machine.save(path)
    for field, source in machine.sources.items():
        print(f"{field:<20}{getattr(machine, field):>12.4g}  {source}")
    return 0


def _some_of(what: str, names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of an option that takes names from `names`, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(dict.fromkeys(text.split(",")))
        for name in given:
            if name not in names:
                raise argparse.ArgumentTypeError(
                    f"there is no {what} {name!r}; accepted, separated by commas: {', '.join(names)}"
                )
        return given

    return parse
