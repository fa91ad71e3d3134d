"""The command line: `shardcomm COMMAND`, or `python -m shardcomm COMMAND`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import NoReturn

import shardcomm
from shardcomm.cli import plan as plan_command
from shardcomm.cli import trace as timeline_command
from shardcomm.cli.bench import command as bench
from shardcomm.cli.doctor import command as doctor
from shardcomm.cli.ps import command as ps
from shardcomm.cli.train import command as train


def main() -> int:
    """Runs the subcommand that the arguments name; returns the exit status (130 after Ctrl-C, 143 after SIGTERM)."""
    signal.signal(signal.SIGTERM, _terminate)
    parser = argparse.ArgumentParser(prog="shardcomm", description=shardcomm.__doc__)
    parser.add_argument("--version", action="version", version=shardcomm.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train.add_parser(commands)
    plan_command.add_parser(commands)
    bench.add_parser(commands)
    timeline_command.add_parser(commands)
    doctor.add_parser(commands)
    ps.add_parser(commands)
    args = parser.parse_args()
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except _Terminated:
        print("\nshardcomm: terminated", file=sys.stderr)  # below the progress bar
        return 143
    except KeyboardInterrupt:
        print("\nshardcomm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)  # whoever read the output has enough
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"shardcomm: {where}{error.strerror or error}", file=sys.stderr)
        os._exit(1)  # without another try to write what could not be written
    return status


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
