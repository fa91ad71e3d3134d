"""What test_played_cuda.py runs of collectives, each function in a process of its own.

PYTHONPATH=tests python -m support.played_collectives NAME [EXTENSION]
"""

from __future__ import annotations

import os
import sys
import threading
import weakref

import pytest
import torch

# isort: split
# Before shardcomm, whose extension it replaces.
from support.played_ranks import RANKS, check_grads, check_params, played_cuda, run_ranks, values

# isort: split
from shardcomm import _C, Bucket, Communicator, Layout, ParamSpec, Pending
from shardcomm.comm.core import CoreCommunicator
from shardcomm.stream import streams
from shardcomm.stream.streams import compute_stream
from support.gates import until


def gather_and_reduce() -> None:
    """What is queued on streams comes to the values that it stands for."""

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        full = values(9)
        bucket = Bucket.from_tensors(full, comm, param_dtype=torch.bfloat16)
        bucket.all_gather(async_op=True).wait()
        grads = [grad.bfloat16() for grad in values(comm.rank).values()]
        bucket.reduce_scatter(grads, async_op=True).wait()
        stream.synchronize()
        check_params(bucket, full)
        check_grads(bucket, [values(rank) for rank in range(RANKS)])

    run_ranks(body)


def owners_of_whole_parameters() -> None:
    """Shards differ in length: NCCL's broadcasts and reduces, a group of them a collective."""

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        full = values(9)
        specs = [ParamSpec(name, tuple(value.shape), "tensor") for name, value in full.items()]
        layout = Layout.plan(specs, RANKS, owners=[1] * (len(specs) - 1) + [0])
        bucket = Bucket(layout, comm)
        bucket.load(list(full.values()))
        for step in range(3):
            bucket.all_gather(async_op=True).wait()
            for shard in bucket.shards:
                shard.grad = None
            grads = [grad + step for grad in values(comm.rank).values()]
            bucket.reduce_scatter(grads, async_op=True).wait()
        stream.synchronize()
        check_params(bucket, full)
        of_ranks = [{n: v + 2 for n, v in values(rank).items()} for rank in range(RANKS)]
        check_grads(bucket, of_ranks)
        taken = {receipt.operation: receipt.taken for receipt in comm.receipts()}
        assert (taken["all_gather"], taken["reduce_scatter"]) == ("broadcasts", "reduces")

    run_ranks(body)


def two_events_a_collective() -> None:
    """In the steady state: no more are recorded, none is made, timed or asked, and no memory is made."""
    comm = CoreCommunicator(_C.make_nccl(_C.nccl_unique_id(), 0, RANKS, 0, 60.0))
    bucket = Bucket.from_tensors(values(0), comm)
    grads = list(values(1).values())

    def steps(number: int) -> None:
        for _ in range(number):
            bucket.all_gather(async_op=True).wait()
            bucket.reduction.pack(grads, async_op=True)
            bucket.reduction.reduce(async_op=True).wait()
            bucket.gradients.forget(shown=False)

    with played_cuda.Stream():
        steps(300)  # a watchdog holds the events of so many
        before = played_cuda.counts()
        steps(10)
        after = played_cuda.counts()
    made = {name: getattr(after, name) - getattr(before, name) for name, _ in before._fields_}
    assert made["events_recorded"] <= 10 * 2 * 2
    assert made["events_created"] == made["allocations"] == made["event_queries"] == 0
    comm.close()


def memory_is_kept_until_waited_for() -> None:
    """By its Work alone, after which nothing holds it."""

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        bucket = Bucket.from_tensors(values(0), comm)
        work, gone = bucket.all_gather(async_op=True), weakref.ref(bucket.gathering)
        shard = bucket.shard  # a GPU's allocator would give it to what comes later on the stream
        del bucket
        assert gone() is not None
        work.wait()
        assert gone() is None
        assert not streams._kept
        stream.synchronize()
        del shard

    run_ranks(body)


def memory_of_dropped_work_is_kept_until_done() -> None:
    """Nobody waits: it is held until its event has fired, and then let go of."""
    all_fired = threading.Barrier(RANKS)

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        bucket = Bucket.from_tensors(values(comm.rank), comm)
        stream.synchronize()
        gone, gate = weakref.ref(bucket.gathering), threading.Event()
        held = stream.enqueue(gate.wait)  # what is computed goes on
        bucket.all_gather(async_op=True)
        del bucket
        streams.keep_until(compute_stream(comm.device).record())
        assert gone() is not None
        gate.set()
        stream.synchronize()
        del held
        comm.streams.gather.synchronize()
        all_fired.wait(
            60
        )  # what is kept goes in the order in which it came, and the ranks are threads of one process
        streams.keep_until(compute_stream(comm.device).record())
        assert gone() is None

    run_ranks(body)


def barrier_that_was_aborted_raises() -> None:
    """What was aborted on the device has ended, and is not done."""

    def body(comm: Communicator, _: played_cuda.Stream) -> None:
        comm.barrier()
        if comm.rank == 0:
            abort = threading.Timer(0.3, comm.abort, ("enough",))
            abort.start()
            with pytest.raises(_C.CommError, match="rank 0 of 2: aborted: enough"):
                comm.barrier()
            abort.join()
        else:
            comm.abort("enough")

    run_ranks(body)


def bound_collectives() -> None:
    """Called, they go to the stream on which torch computes; queued, to the one that was given."""

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        full, sent = torch.zeros(2, 4 * RANKS), torch.full((4,), comm.rank + 1.0)
        grads, grad = torch.full((4 * RANKS,), comm.rank + 1.0), torch.zeros(4)
        buffer, root = torch.full((4,), comm.rank + 1.0), torch.full((4,), comm.rank + 1.0)
        total = RANKS * (RANKS + 1) / 2
        comm.bind_all_gather(full[0], sent)()
        comm.bind_reduce_scatter(grad, grads, scale=0.5)()
        comm.bind_all_reduce(buffer)()
        comm.bind_broadcast(root, 1)()
        work = comm.bind_all_gather(full[1], sent).start(comm.streams.gather)
        work.wait()
        stream.synchronize()
        every = torch.arange(1.0, RANKS + 1).repeat_interleave(4)
        assert torch.equal(full, every.expand(2, -1))
        assert torch.equal(grad, torch.full((4,), total / 2))
        assert torch.equal(buffer, torch.full((4,), total))
        assert torch.equal(root, torch.full((4,), 2.0))

    run_ranks(body)


def bound_barrier_that_was_aborted_raises() -> None:
    """As `barrier_that_was_aborted_raises`."""

    def body(comm: Communicator, _: played_cuda.Stream) -> None:
        barrier = comm.bind_barrier()
        barrier()
        if comm.rank == 0:
            abort = threading.Timer(0.3, comm.abort, ("enough",))
            abort.start()
            with pytest.raises(_C.CommError, match="rank 0 of 2: aborted: enough"):
                barrier()
            abort.join()
        else:
            comm.abort("enough")

    run_ranks(body)


def a_rank_tells_what_it_is_in() -> None:
    """Its own calls: one that runs on the device since its turn came, and one whose turn has not come."""
    come = threading.Event()

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        comm.barrier()
        none = [Pending(comm.rank, os.getpid())]
        assert comm.pending() == none
        if comm.rank == 1:
            assert come.wait(60)
        sent = torch.zeros(4, device=comm.device)
        queue = compute_stream(comm.device)
        received = torch.zeros(2, 8, device=comm.device)
        comm.all_gather(received[0], sent)
        comm.all_gather(received[1], sent, tag=3)
        if comm.rank == 0:

            def in_the_first() -> list[Pending]:
                entries = comm.pending()
                return entries if len(entries) == 2 and entries[0].waiting_s else []

            entries = until(in_the_first, "the device waits for rank 1")
            first, then = entries
            assert (first.channel, first.call) == ("gather", "all_gather(f32, count 4)")
            assert (then.call, then.waiting_s) == ("all_gather(f32, count 4, tag 3)", None)
            assert then.sequence == (first.sequence or 0) + 1
            come.set()
        queue.synchronize()
        until(lambda: comm.pending() == none, "all is done")

    run_ranks(body)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
