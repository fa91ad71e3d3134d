"""Runs N thread ranks of this process over the `local` transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch

from shardcomm import Communicator

T = TypeVar("T")


def run_threads(
    fn: Callable[[Communicator], T], ranks: int, *, deadline_s: float = 60.0, device: str = "cpu"
) -> list[T]:
    """fn(communicator) in one thread per rank; results in rank order, or the first rank's exception.

    On a GPU each rank computes on a stream of its own, and runs its backwards itself.
    """
    comms = Communicator.local_group(ranks, deadline_s=deadline_s, device=device)
    results: list[T | None] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def body(rank: int) -> None:
        try:
            on_gpu = comms[rank].device.type == "cuda"
            stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext()
            with stream, torch.autograd.set_multithreading_enabled(not on_gpu):
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
