"""`shardcomm cluster`: its options, and how it ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TextIO, TypeVar

from shardcomm.cli.cluster.report import Report
from shardcomm.cli.options import check_outputs, positive, whole
from shardcomm.cluster.cluster import MOST_RANKS, Cluster
from shardcomm.cluster.environment import check_program
from shardcomm.cluster.hosts import MOST_HOSTS
from shardcomm.cluster.kills import check_there, parse_kill
from shardcomm.cluster.namespaces import NoHostsError
from shardcomm.cluster.processes import Processes, Stream
from shardcomm.cluster.quantities import parse_duration, parse_rate

T = TypeVar("T")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "cluster",
        help="run a program on several hosts that this machine plays, over slow links, and kill some of it",
        description="Makes hosts of this machine: network namespaces with addresses, names, processes and a /dev/shm "
        "of their own, joined by links of the rate that is given. On each it runs COMMAND as so many ranks, under "
        "torchrun. Each line that they print has its host's name before it. At the end a table tells what each host's "
        "link has carried. Whatever ends the command, nothing is left of the hosts.",
        usage="%(prog)s --hosts N --ranks N --rate RATE [options] -- COMMAND [ARGUMENT ...]",
    )
    parser.add_argument("--hosts", type=whole(1, MOST_HOSTS), required=True, metavar="N",
                        help="number of hosts: host0, host1, ...")  # fmt: skip
    parser.add_argument("--ranks", type=whole(1, MOST_RANKS), required=True, metavar="N",
                        help="number of ranks of each host")  # fmt: skip
    parser.add_argument("--rate", type=_checked_by(parse_rate), required=True,
                        help="what each host's link carries in each direction, in bits a second, such as 1gbit or "
                        "100mbit")  # fmt: skip
    parser.add_argument("--delay", type=_checked_by(parse_duration), metavar="TIME",
                        help="how long a packet is under way from a host to another, such as 200us; the kernel must "
                        "have netem")  # fmt: skip
    parser.add_argument("--kill", action="append", default=[], metavar="WHOM AND WHEN",
                        help="kill a host, as by a power cut, or a rank: 'host1 at step 7', 'rank 2 after 500ms'; "
                        "times count from the start of the processes, and steps are those that the program announces "
                        "by shardcomm.cluster.step(N); may be given several times")  # fmt: skip
    parser.add_argument("--timeout", type=positive, metavar="SECONDS",
                        help="end all after this time, with exit status 1")  # fmt: skip
    parser.add_argument("--json", metavar="FILE",
                        help="write the table to this file, too; - for stdout, where nothing else then is")  # fmt: skip
    parser.add_argument("command", nargs="+", metavar="COMMAND",
                        help="a Python script (its name ends in .py) or another program, and its arguments; each rank "
                        "runs it, with the variables that torchrun sets")  # fmt: skip
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit status: 0; that of the first torchrun that failed, on a host that was not to be killed; 1 if hosts
        cannot be made here, the time is over, or something has not been killed that was to be; 2 for bad options.
    """
    try:
        kills = [parse_kill(each) for each in args.kill]
        check_there(kills, args.hosts, args.hosts * args.ranks)
    except ValueError as error:
        parser.error(f"--kill is {error}")
    try:
        check_program(args.command)
    except ValueError as error:
        parser.error(f"COMMAND is {error}")
    check_outputs(parser, args, "json")
    cluster = Cluster(args.hosts, args.ranks, args.rate, args.delay)
    write = partial(_write, sys.stderr if args.json == "-" else sys.stdout)
    try:
        with cluster.command(args.command, kills, write) as processes:
            said = _wait(processes, args.timeout)
            report = Report.of(cluster, kills, processes, failed=bool(said))
    except NoHostsError as error:
        print(f"shardcomm cluster: {error}", file=sys.stderr)
        return 1
    print(report.table(), file=sys.stderr if args.json == "-" else sys.stdout)
    report.write_json(args.json)
    for sentence in said:
        print(f"shardcomm cluster: {sentence}", file=sys.stderr)
    return report.status


def _wait(processes: Processes, timeout_s: float | None) -> list[str]:
    """Waits for all processes. Returns a sentence for each thing that has not gone as it was asked for."""
    try:
        processes.wait(timeout_s, grace_s=None)
    except TimeoutError as error:
        return [str(error)]
    return [
        f"--kill is {kill!r}, which did not happen: {why}"
        for kill, why in processes.kills.missed().items()
    ]


def _write(stdout: TextIO, stream: Stream, line: str) -> None:
    print(line, end="", file=stdout if stream == "stdout" else sys.stderr, flush=True)


def _checked_by(parse: Callable[[str], object]) -> Callable[[str], str]:
    """The type of an option whose text `parse` accepts."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check
