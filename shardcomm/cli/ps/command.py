"""`shardcomm ps`: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from shardcomm.cli.options import whole
from shardcomm.cli.ps.groups import Found, Rank, ShmGroup, find
from shardcomm.cli.ps.stacks import Stacks, ask

_NONE = (
    "no groups of shardcomm over shared memory (transports shm and hosts); what communicates by Gloo or NCCL alone is "
    "not seen"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "ps",
        help="say which ranks of this host wait, in which collective, for how long and for whom",
        description="Lists the groups of processes (transports shm and hosts) of this host. For each rank it prints "
        "its process, whether it runs, waits, is stopped or dead, the collective that it is in, for how long, and for "
        "whom it waits. It reads memory that the ranks share, so that no rank is stopped or takes part. With the other "
        "transports a process prints on SIGUSR1 what its ranks are in; see shardcomm.enable_stack_dumps.",
    )
    parser.add_argument(
        "--stacks",
        action="store_true",
        help="print the Python stacks of ranks, too, if shardcomm started them or they have called "
        "shardcomm.enable_stack_dumps()",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("groups", nargs="*", type=whole(0, 2**63 - 1), metavar="GROUP",
                        help="the number of a group, as `ps` prints it: tell of that one alone, and ask only its "
                        "ranks for their stacks (default: all groups)")  # fmt: skip
    parser.set_defaults(run=lambda args: run(parser, args))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command. Exit status: 0, or 2 for a group that is not there."""
    found = find()
    if args.groups:
        there = {group.id: group for group in found.groups}
        for number in args.groups:
            if number not in there:
                known = ", ".join(map(str, there)) or "none"
                parser.error(f"GROUP is {number}; groups of this host: {known}")
        found.groups = [there[number] for number in dict.fromkeys(args.groups)]
    stacks = ask(_answering(found)) if args.stacks else None
    if args.json:
        print(json.dumps(_as_dict(found, stacks), indent=1))
    else:
        print(screen(found, stacks))
    return 0


def _answering(found: Found) -> list[int]:
    # A signal to a stopped process would wait there, and would be answered when nobody listens any more.
    ranks = [rank for group in found.groups for rank in group.ranks]
    return [rank.pid for rank in ranks if rank.pid and rank.state not in ("dead", "stopped")]


def _stacks_of(rank: Rank, stacks: dict[int, Stacks]) -> Stacks:
    if rank.pid in stacks:
        return stacks[rank.pid]
    return Stacks(None, "it is stopped" if rank.state == "stopped" else "there is no process")


def _as_dict(found: Found, stacks: dict[int, Stacks] | None) -> dict[str, Any]:
    def of(rank: Rank) -> dict[str, Any]:
        calls = [call._asdict() for call in rank.calls]
        entry: dict[str, Any] = {
            "rank": rank.rank,
            "pid": rank.pid,
            "state": rank.state,
            "calls": calls,
        }
        if stacks is not None:
            answer = _stacks_of(rank, stacks)
            entry |= {"stacks": answer.text, "no_stacks": answer.reason}
        return entry

    groups = [
        {
            "id": each.id,
            "hosts": each.hosts,
            "host": each.host,
            "failure": each.failure,
            "ranks": [of(rank) for rank in each.ranks],
        }
        for each in found.groups
    ]
    return {"groups": groups, "notes": found.notes}


def screen(found: Found, stacks: dict[int, Stacks] | None) -> str:
    """The whole report as text."""
    parts = [_group(group, stacks) for group in found.groups] or [_NONE]
    return "\n\n".join([*parts, *found.notes])


def _group(group: ShmGroup, stacks: dict[int, Stacks] | None) -> str:
    lines = [f"group {group.id}: {len(group.ranks)} rank{'s' * (len(group.ranks) != 1)}"]
    if group.hosts:
        lines[0] += f" of {group.hosts * len(group.ranks)}, on host {group.host} of {group.hosts}"
    if group.failure:
        lines.append(f"  failed: {group.failure}")
    width = max(len(rank.state) for rank in group.ranks)
    pid_width = max(len(str(rank.pid or "?")) for rank in group.ranks)
    for rank in group.ranks:
        head = f"  rank {rank.rank:<3} pid {rank.pid or '?':<{pid_width}}  {rank.state:<{width}}  "
        said = [str(call) for call in rank.calls] or ["in no collective"]
        lines += [head + said[0], *(" " * len(head) + each for each in said[1:])]
        if stacks is not None:
            answer = _stacks_of(rank, stacks)
            text = answer.text or f"no stacks: {answer.reason}"
            lines.append(textwrap.indent(text.rstrip(), "      "))
    return "\n".join(lines)
