"""Runs thread ranks of this process over the `local` transport: a row of them, or a mesh."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch

from shardcomm import Communicator, Mesh

T = TypeVar("T")
Ranks = TypeVar("Ranks", Communicator, Mesh)


def run_group(fn: Callable[[Communicator], T], group: Sequence[Communicator]) -> list[T]:
    """As `run_threads`, over a local group whose deadline is at most 60 s."""
    return _run(fn, group, 60.0)


def run_threads(
    fn: Callable[[Communicator], T], ranks: int, *, deadline_s: float = 60.0, device: str = "cpu"
) -> list[T]:
    """fn(communicator) in one thread per rank; results in rank order, or the first rank's exception.

    On a GPU each rank computes on a stream of its own, and runs its backwards itself.
    """
    return _run(
        fn, Communicator.local_group(ranks, deadline_s=deadline_s, device=device), deadline_s
    )


def run_mesh(
    fn: Callable[[Mesh], T],
    replicas: int,
    shards: int,
    *,
    deadline_s: float = 60.0,
    device: str = "cpu",
) -> list[T]:
    """As `run_threads`, with `replicas` rows of `shards` ranks each."""

    def groups(number: int, ranks: int) -> list[list[Communicator]]:
        return [
            Communicator.local_group(ranks, deadline_s=deadline_s, device=device)
            for _ in range(number)
        ]

    rows, columns = groups(replicas, shards), groups(shards, replicas)
    meshes = [Mesh(rows[r][s], columns[s][r]) for r in range(replicas) for s in range(shards)]
    return _run(fn, meshes, deadline_s)


def each_rank(fn: Callable[[int], T], ranks: int, *, timeout_s: float = 60.0) -> list[T]:
    """fn(rank) in one thread per rank, without a communicator; what it returns and raises is as of `run_threads`."""
    results: list[T | None] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), f"ranks still run after {timeout_s} s"
    raised = [error for error in errors if error is not None]
    # A rank's own error comes before the others' CommErrors about it.
    raised.sort(key=lambda error: type(error).__name__ == "CommError")
    if raised:
        raise raised[0]
    return results  # type: ignore[return-value]


def _run(fn: Callable[[Ranks], T], ranks: Sequence[Ranks], deadline_s: float) -> list[T]:
    def body(index: int) -> T:
        rank = ranks[index]
        try:
            on_gpu = rank.device.type == "cuda"
            stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext()
            with stream, torch.autograd.set_multithreading_enabled(not on_gpu):
                return fn(rank)
        except BaseException as error:
            for comm in (rank.shard, rank.replicate) if isinstance(rank, Mesh) else (rank,):
                comm.abort(f"{type(error).__name__}: {error}")
            raise

    # A test may be about ranks that end at their deadline.
    return each_rank(body, len(ranks), timeout_s=deadline_s + 10)
