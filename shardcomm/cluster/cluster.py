"""A cluster on one machine: its size, its links, and what runs on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from shardcomm.arguments.checks import check_list, check_seconds, check_type
from shardcomm.arguments.scalars import is_whole
from shardcomm.cluster import calls, environment
from shardcomm.cluster.hosts import MOST_HOSTS, Host, hosts
from shardcomm.cluster.kills import Kill, check_there, parse_kill
from shardcomm.cluster.links import Link
from shardcomm.cluster.on_host import OnHost
from shardcomm.cluster.processes import Process, Processes, Stream, Write
from shardcomm.cluster.quantities import parse_duration, parse_rate
from shardcomm.process.failures import Failure, ended, first_cause
from shardcomm.process.launch import GRACE_S, RankError

T = TypeVar("T")

MOST_RANKS = 1024
"""Of each host."""


@dataclass(frozen=True)
class Cluster:
    """Hosts on one machine with ranks on them: real processes, and links as slow as asked for.

    Each `run` makes the hosts anew: network namespaces of this machine, and at its end nothing is left of them. Ranks
    are numbered host by host: with 2 ranks a host, ranks 2 and 3 are on host1.

    Args:
        hosts: How many hosts, 1 to 250.
        ranks: How many ranks each host has, 1 to 1024.
        rate: What each host's link carries in each direction, such as "1gbit".
        delay: How long a packet is under way from a host to another, such as "200us"; None for no more than it takes.

    Raises:
        ValueError: An argument is out of its range, or has an unknown unit.
    """

    hosts: int
    ranks: int
    rate: str
    delay: str | None = None

    def __post_init__(self) -> None:
        for name, most in (("hosts", MOST_HOSTS), ("ranks", MOST_RANKS)):
            given = getattr(self, name)
            if not is_whole(given, 1, most):
                raise ValueError(
                    f"Cluster: {name} is {given!r}; it must be a whole number from 1 to {most}"
                )
        for name in ("rate", "delay"):
            given = getattr(self, name)
            if name == "rate" or given is not None:
                check_type("Cluster", name, given, str, "a text such as '1gbit' or '200us'")
        with _named("Cluster: rate"):
            parse_rate(self.rate)
        if self.delay is not None:
            with _named("Cluster: delay"):
                parse_duration(self.delay)

    @property
    def link(self) -> Link:
        """What joins a host to the others."""
        return Link(
            parse_rate(self.rate), 0.0 if self.delay is None else parse_duration(self.delay)
        )

    @overload
    def run(
        self,
        what: Callable[..., T],
        args: Sequence[Any] = (),
        *,
        kill: str | Sequence[str] = (),
        timeout_s: float,
    ) -> list[T | None]: ...
    @overload
    def run(
        self, what: Sequence[str], *, kill: str | Sequence[str] = (), timeout_s: float
    ) -> list[OnHost]: ...
    def run(
        self,
        what: Callable[..., Any] | Sequence[str],
        args: Sequence[Any] = (),
        *,
        kill: str | Sequence[str] = (),
        timeout_s: float,
    ) -> list[Any]:
        """Runs a function as each rank, or a command under torchrun on each host. Prints what they print.

        In the function, both `Communicator.from_env()` and `torch.distributed.init_process_group()` find the other
        ranks.

        Args:
            what: A function of a module, or the words of a command: a Python script or another program, and arguments.
            args: The arguments of the function on every rank; they are pickled.
            kill: What to kill and when, such as "host1 at step 7" or "rank 2 after 500ms", or a list of such. Steps are
                those that the ranks announce by `shardcomm.cluster.step`; times count from the start of the processes.
            timeout_s: How long the whole may take, in seconds.

        Returns:
            The results of the function's ranks, in order, with None for a rank that was killed; of a command, what has
            become of each host.

        Raises:
            NoHostsError: This process cannot make hosts.
            RankError: A rank raised, or ended without being asked to; the message has its traceback. Of a command: a
                host's torchrun has failed; the message has the last lines of that host.
            RuntimeError: Something was to be killed, and has not come to that step, or ended before that time.
            TimeoutError: Processes still ran after `timeout_s`, and were killed.
            TypeError: `what`, `args` or `kill` is of another type, or cannot be pickled.
            ValueError: `kill` or `timeout_s` is out of its range, or a command has `args`.
        """
        given = kill if isinstance(kill, Sequence) and not isinstance(kill, str | bytes) else [kill]
        for each in given:
            check_type(
                "run", "kill", each, str, "a text such as 'host1 at step 7', or a list of such"
            )
        with _named("run: kill"):
            kills = [parse_kill(each) for each in given]
            check_there(kills, self.hosts, self.hosts * self.ranks)
        check_seconds("run", "timeout_s", timeout_s)
        if callable(what):
            check_list("run", "args", args)
            return self._run_function(what, args, kills, timeout_s)
        check_list("run", "what", what)
        for word in what:
            check_type("run", "a word of what", word, str, "a text")
        if args:
            raise ValueError(
                f"run: args is {args!r}; it is for a function, and a command has its arguments in what"
            )
        with _named("run: what"):
            environment.check_program(what)
        with self.command(what, kills, _print) as processes:
            processes.wait(timeout_s, grace_s=None)
            if processes.failed:
                first = processes.failed[0]
                lines = "\n".join(processes.on_hosts[first.host.number].last_lines)
                raise RankError(
                    f"torchrun of {first.host.name} ended with status {first.status}:\n{lines}"
                )
            _check_killed(processes)
            return processes.on_hosts

    @contextmanager
    def command(
        self, command: Sequence[str], kills: Sequence[Kill], write: Write
    ) -> Iterator[Processes]:
        """Starts a command under torchrun on each host; they end with the context."""
        with self._processes(kills, write) as (where, processes):
            for host in where:
                words = environment.torchrun(where, host, self.ranks, command)
                env = environment.of_host(where, host, self.ranks, kills)
                processes.start(host, words, env)
            yield processes

    def _run_function(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kills: Sequence[Kill],
        timeout_s: float,
    ) -> list[Any]:
        call = calls.pack(fn, args)
        with self._processes(kills, _print) as (where, processes), ExitStack() as opened:
            outcomes = []
            for host in where:
                shared = environment.of_host(where, host, self.ranks, kills)
                for local_rank in range(self.ranks):
                    files = [os.memfd_create(name) for name in ("call", "outcome")]
                    for descriptor in files:
                        opened.callback(os.close, descriptor)
                    outcomes.append(files[1])
                    with open(files[0], "wb", closefd=False) as file:
                        file.write(call)  # a single os.write takes 2 GiB at most
                    os.lseek(files[0], 0, os.SEEK_SET)
                    words = [sys.executable, "-m", "shardcomm.cluster.rank", *map(str, files)]
                    env = shared | environment.of_rank(where, host, self.ranks, local_rank)
                    processes.start(host, words, env, rank=int(env["RANK"]), pass_fds=files)
            processes.wait(timeout_s, grace_s=GRACE_S)
            return _results(processes, outcomes)

    @contextmanager
    def _processes(
        self, kills: Sequence[Kill], write: Write
    ) -> Iterator[tuple[list[Host], Processes]]:
        with hosts(self.hosts, self.link) as where:
            processes = Processes(where, self.ranks, kills, write)
            try:
                yield where, processes
            finally:
                processes.close()


@contextmanager
def _named(argument: str) -> Iterator[None]:
    """Puts an argument's name before the text of a ValueError, which begins with what was given."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{argument} is {error}") from None


def _results(processes: Processes, outcomes: Sequence[int]) -> list[Any]:
    written = [_content(outcome) for outcome in outcomes]
    failures: dict[int, Failure] = {}
    for process, outcome in zip(processes.all, written, strict=True):
        if process in processes.failed or (process.status == 0 and not outcome):
            assert process.rank is not None
            failures[process.rank] = _failure(process, outcome)
    if failures:
        raise RankError(first_cause(failures))
    _check_killed(processes)
    return [
        calls.unpack(outcome) if process.status == 0 else None
        for process, outcome in zip(processes.all, written, strict=True)
    ]


def _failure(process: Process, outcome: bytes) -> Failure:
    if process.status == 1 and outcome:
        failure: Failure = calls.unpack(outcome)
        return failure
    return ended(process.status)


def _content(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def _check_killed(processes: Processes) -> None:
    for kill, why in processes.kills.missed().items():
        raise RuntimeError(f"run: kill {kill!r} did not happen: {why}")


def _print(stream: Stream, line: str) -> None:
    print(line, end="", file=getattr(sys, stream), flush=True)
