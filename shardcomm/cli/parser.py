"""The parser of the command line: all commands, with their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shardcomm
from shardcomm.cli import plan as plan_command
from shardcomm.cli import trace as timeline_command
from shardcomm.cli.bench import command as bench
from shardcomm.cli.cluster import command as cluster
from shardcomm.cli.doctor import command as doctor
from shardcomm.cli.ps import command as ps
from shardcomm.cli.simulate import command as simulate
from shardcomm.cli.train import command as train
from shardcomm.files.installed import get_cmake_dir


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; what it parses has the command to run as `run`."""
    parser = argparse.ArgumentParser(
        prog="shardcomm",
        description="Trains, plans, measures and looks at sharded models and their collectives.",
    )
    parser.add_argument("--version", action="version", version=shardcomm.__version__)
    parser.add_argument(
        "--cmakedir",
        action=_PrintCmakeDir,
        nargs=0,
        help="print the folder for -Dshardcomm_DIR= of CMake, and end",
    )
    kind: type[argparse.ArgumentParser] = _CommandParser
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=kind
    )
    train.add_parser(commands)
    plan_command.add_parser(commands)
    simulate.add_parser(commands)
    bench.add_parser(commands)
    timeline_command.add_parser(commands)
    cluster.add_parser(commands)
    doctor.add_parser(commands)
    ps.add_parser(commands)
    return parser


# What nccl-tests and torchrun call the number of processes.
_RANKS_ELSEWHERE = {"-g", "--nproc-per-node", "--nproc_per_node"}


class _CommandParser(argparse.ArgumentParser):
    """Refuses what it does not know itself, so that its own options are shown and not those of `shardcomm`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            means_ranks = _RANKS_ELSEWHERE & {each.partition("=")[0] for each in unknown}
            hint = "; the number of ranks is --ranks" if means_ranks else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown


class _PrintCmakeDir(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(get_cmake_dir())
        parser.exit()
