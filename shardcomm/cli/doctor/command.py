"""`shardcomm doctor`: its option and its exit status."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from shardcomm.cli.doctor import self_test
from shardcomm.cli.doctor.findings import findings
from shardcomm.cli.doctor.screen import screen
from shardcomm.cli.options import check_outputs, opened


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what works on this machine, and what does not and why",
        description="Says what this build of shardcomm has, what it finds on this machine, and which transports can be "
        "used; for each that cannot, it says why and what to do. Then it tests them, in some seconds, and says "
        "which path each collective takes. It exits with 1 if a test fails.",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write JSON to this file instead; - for stdout"
    )
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command. Exit status: 0, 1 if the self-test or the writing of FILE failed, or 2 for a bad FILE."""
    check_outputs(parser, args, "json")
    found = findings()
    usable = [name for name, state in found["transports"].items() if state["usable"]]
    found["self_test"] = self_test.self_test(usable)
    text = screen(found) if args.json is None else json.dumps(found, indent=1)
    with opened(args.json or "-") as out:
        print(text, file=out)
    return _verdict(found["self_test"])


def _verdict(tests: list[dict[str, Any]]) -> int:
    failed = [test for test in tests if test["errors"]]
    for test in failed:
        error = test["errors"][0].splitlines()[0]
        print(f"shardcomm doctor: the self-test of {test['name']} failed: {error}", file=sys.stderr)
    return 1 if failed else 0
