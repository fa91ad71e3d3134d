"""A fault at every operation that a rank's rendezvous asks of the store: the other rank hears of it, by name."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Literal, TypedDict

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shardcomm import CommError, Communicator
from shardcomm.comm import rendezvous
from shardcomm.meeting.store import serve_on_loopback

Kind = Literal["raise", "raise after", "kill", "kill after"]

RANKS = 2
DEADLINE_S = 60.0
NOTICED_S = 10.0  # of a fault, long before the deadline
UNKNOWN_S = 5.0  # the deadline where nothing else tells of it


def is_unknown(kind: Kind, point: int) -> bool:
    """Whether the victim dies before its first word, by which others know its process: they wait until the deadline."""
    return kind == "kill" and point == 1


class Story(TypedDict):
    """What became of one run."""

    struck: float
    """When; 0 if the rank did not come to that operation."""
    said: list[str]
    """By rank: "" if all went well, None of a rank that was killed."""
    ended: list[float]


class StruckStore:
    """A store whose `point`th operation fails, or ends the process."""

    def __init__(self, store: Store, kind: Kind, point: int, tell: int) -> None:
        self._store = store
        self._kind = kind
        self._point = point
        self._tell = tell
        self._operations = count(1)

    def compare_set(self, *arguments: Any) -> bytes:
        """All that set-up asks of a store."""
        if next(self._operations) != self._point:
            return self._store.compare_set(*arguments)
        if self._kind.endswith("after"):
            self._store.compare_set(*arguments)
        os.write(self._tell, json.dumps({"struck": time.monotonic()}).encode() + b"\n")
        if self._kind.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise dist.DistNetworkError("the connection was lost")


def be_rank(rank: int, victim: int, kind: Kind, point: int, run: int, port: int, tell: int) -> None:
    """One of the two, in a process of its own."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(run),  # keys of its own
    )
    reach = rendezvous.env_store

    def struck(*arguments: Any) -> tuple[Any, int, int]:
        store, *us = reach(*arguments)
        return (StruckStore(store, kind, point, tell), *us)

    if rank == victim:
        rendezvous.env_store = struck  # type: ignore[assignment]
    said = ""
    try:
        deadline_s = UNKNOWN_S if is_unknown(kind, point) else DEADLINE_S
        comm = Communicator.from_env(deadline_s=deadline_s, transport="shm")
        numbers = torch.arange(3.0) + rank
        comm.all_reduce(numbers)
        if numbers.tolist() != [1.0, 3.0, 5.0]:
            said = f"wrong sum: {numbers}"
    except CommError as error:
        said = str(error)
    word = {"rank": rank, "said": said, "ended": time.monotonic()}
    os.write(tell, json.dumps(word).encode() + b"\n")


def run_until_it_passes(
    kind: Kind, victim: int, port: int, first_run: int, ear: Connection
) -> None:
    """In a process without threads, which forks the ranks: to start Python for each would take minutes."""
    torch.set_num_threads(1)
    for point in count(1):
        listen, tell = os.pipe()
        pids = []
        for rank in range(RANKS):
            if (pid := os.fork()) == 0:
                # PR_SET_PDEATHSIG: none outlives the test.
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                try:
                    be_rank(rank, victim, kind, point, first_run + point, port, tell)
                finally:
                    os._exit(0)
            pids.append(pid)
        os.close(tell)
        for pid in pids:
            os.waitpid(pid, 0)
        with os.fdopen(listen) as lines:
            story: Story = {"struck": 0.0, "said": ["killed"] * RANKS, "ended": [0.0] * RANKS}
            for line in lines:
                word = json.loads(line)
                if "struck" in word:
                    story["struck"] = word["struck"]
                else:
                    story["said"][word["rank"]] = word["said"]
                    story["ended"][word["rank"]] = word["ended"]
        ear.send(story)
        if not story["struck"]:
            return


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("kind", ["raise", "raise after", "kill", "kill after"])
def test_a_fault_at_every_operation_of_the_store_is_heard_by_the_other_rank(
    kind: Kind, victim: int
) -> None:
    store = serve_on_loopback()
    context = get_context("forkserver")
    ear, mouth = context.Pipe(duplex=False)
    forker = context.Process(
        target=run_until_it_passes, args=(kind, victim, store.port, 1, mouth), daemon=False
    )
    forker.start()
    mouth.close()
    other = 1 - victim
    try:
        for point in count(1):
            assert ear.poll(2 * DEADLINE_S), f"operation {point}: it hangs"
            story: Story = ear.recv()
            context_of = f"{kind} at operation {point} of rank {victim}: {story}"
            if not story["struck"]:
                assert story["said"] == ["", ""], context_of
                break
            bound = NOTICED_S + (UNKNOWN_S if is_unknown(kind, point) else 0)
            assert story["ended"][other] - story["struck"] < bound, context_of
            if is_unknown(kind, point):
                assert f"no word of rank {victim}" in story["said"][other], context_of
            elif kind.startswith("kill"):
                assert f"rank {victim} (pid " in story["said"][other], context_of
                assert "died" in story["said"][other], context_of
            else:
                lost = f"rank {victim} of {RANKS}: the rendezvous failed: the connection was lost"
                assert lost in story["said"][victim], context_of
                assert f"rank {victim}" in story["said"][other], context_of
        assert point > 3, "three rounds, and a question in each"
    finally:
        forker.kill()
        forker.join(10)
        forker.close()
