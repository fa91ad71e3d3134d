"""Runs N thread ranks of this process over the `local` transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from shardcomm import Communicator

T = TypeVar("T")


def run_threads(
    fn: Callable[[Communicator], T], ranks: int, *, deadline_s: float = 60.0
) -> list[T]:
    """fn(communicator) in one thread per rank; results in rank order, or the first rank's exception."""
    comms = Communicator.local_group(ranks, deadline_s=deadline_s)
    results: list[T | None] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def body(rank: int) -> None:
        try:
            results[rank] = fn(comms[rank])
        except BaseException as error:
            errors[rank] = error
            comms[rank].abort(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s)
    assert not any(thread.is_alive() for thread in threads), f"ranks still run after {deadline_s} s"
    raised = [error for error in errors if error is not None]
    # A rank's own error comes before the others' CommErrors about it.
    raised.sort(key=lambda error: type(error).__name__ == "CommError")
    if raised:
        raise raised[0]
    return results  # type: ignore[return-value]
