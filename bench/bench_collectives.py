"""compare_gloo's contenders, one at a time, under pytest-benchmark: two ranks, shm beside Gloo and a plain copy.

    pytest bench/bench_collectives.py --benchmark-json FILE

The pytest process is rank 0; rank 1 is a process of its own, told which case comes and then left alone with it. What is
timed is rank 0's call, from a barrier before it to its return. Rank 1 runs as many calls, and both check the results
once, before. What happens between the rounds of one contender hits that one alone; for ratios, see compare_gloo.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from compare_gloo import OPS, contenders
from pytest_benchmark.fixture import BenchmarkFixture

import shardcomm

RANKS, ROUNDS, WARM_UP = 2, 50, 2
PEERS = ("window", "Python", "gloo", "memcpy")
DEADLINE_S = 60.0

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch renames its collectives


def join(rank: int, store: dist.Store) -> shardcomm.Communicator:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=DEADLINE_S)
    )
    return shardcomm.Communicator.from_process_group(deadline_s=DEADLINE_S)


def serve(port: int, cases: Connection) -> None:
    """Rank 1: takes part in one case (name, size) after another, until None."""
    comm = join(1, dist.TCPStore("127.0.0.1", port))
    while (case := cases.recv()) is not None:
        name, size = case
        run = contenders(comm, size)[name]
        for _ in range(WARM_UP + ROUNDS):
            comm.barrier()
            run()
    comm.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def rank0() -> Iterator[tuple[shardcomm.Communicator, Connection]]:
    """Rank 0's communicator, and the way to tell rank 1 what comes."""
    context = get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    theirs, ours = context.Pipe(duplex=False)
    peer = context.Process(target=serve, args=(store.port, theirs), daemon=True)
    peer.start()
    comm = None
    try:
        comm = join(0, store)
        yield comm, ours
        ours.send(None)
    finally:
        if comm is not None:
            comm.close()
            dist.destroy_process_group()
        peer.join(5)
        peer.kill()


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("size", [1 << 10, 1 << 20, 16 << 20])
@pytest.mark.parametrize("op", OPS)
def test_collective(
    benchmark: BenchmarkFixture,
    rank0: tuple[shardcomm.Communicator, Connection],
    op: str,
    size: int,
    peer: str,
) -> None:
    if op == "barrier" and peer in ("window", "memcpy"):
        pytest.skip("a barrier moves nothing")
    comm, cases = rank0
    benchmark.group = f"{op}, {RANKS} ranks, {size} B"
    cases.send((f"{op}/{peer}", size))
    run = contenders(comm, size)[f"{op}/{peer}"]
    benchmark.pedantic(run, setup=comm.barrier, rounds=ROUNDS, warmup_rounds=WARM_UP)
