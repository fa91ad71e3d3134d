"""What test_played_cuda.py runs, each function in a process of its own: ranks are threads, GPUs and NCCL are played.

PYTHONPATH=tests python -m support.played_cases NAME [EXTENSION]
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import played_cuda

INSTANT = ["two_events_a_collective"]
played_cuda.install(
    instant=sys.argv[1] in INSTANT, extension=Path(sys.argv[2]) if sys.argv[2:] else None
)

from shardcomm import _C, Bucket, Communicator, Layout, ParamSpec, Pending, fully_shard  # noqa: E402
from shardcomm.bucket import bucket  # noqa: E402
from shardcomm.comm.core import CoreCommunicator  # noqa: E402
from shardcomm.engine import sharding  # noqa: E402
from shardcomm.stream import streams  # noqa: E402
from shardcomm.stream.streams import compute_stream  # noqa: E402
from support.gates import until  # noqa: E402

# What is played computes when its stream does, and torch here at once: nothing that is gathered can be read at set-up.
bucket.difference = sharding.difference = lambda _groups, _items: ""
sharding.check_secondary = lambda _mesh: None

RANKS = 2
SHAPES = {"weight": (24, 16), "bias": (24,), "scale": (16,)}


def run_ranks(body: Callable[[Communicator, played_cuda.Stream], None], ranks: int = RANKS) -> None:
    """`body(communicator, stream)` on each rank, which computes on that stream."""
    unique_id = _C.nccl_unique_id()
    errors: list[BaseException] = []

    def rank_body(rank: int) -> None:
        try:
            comm = CoreCommunicator(_C.make_nccl(unique_id, rank, ranks, 0, 60.0))
            with played_cuda.Stream() as stream:
                body(comm, stream)
                stream.synchronize()
            comm.close()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def values(seed: int) -> dict[str, torch.Tensor]:
    """Small integers, whose sums and means over two ranks are exact."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-8, 9, shape, generator=generator).float()
        for name, shape in SHAPES.items()
    }


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
        work, gone = bucket.all_gather(async_op=True), weakref.ref(bucket)
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

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        bucket = Bucket.from_tensors(values(comm.rank), comm)
        stream.synchronize()
        gone, gate = weakref.ref(bucket), threading.Event()
        held = stream.enqueue(gate.wait)  # what is computed goes on
        bucket.all_gather(async_op=True)
        del bucket
        streams.keep_until(compute_stream(comm.device).record())
        assert gone() is not None
        gate.set()
        stream.synchronize()
        del held
        comm.streams.gather.synchronize()
        streams.keep_until(compute_stream(comm.device).record())
        assert gone() is None

    run_ranks(body)


def captured_bucket() -> None:
    """A gather and a reduce, captured once, give at each launch what the values of then come to."""

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        bucket = Bucket.from_tensors(values(0), comm)
        grads = list(values(0).values())

        def step() -> None:
            bucket.all_gather(async_op=True).wait()
            bucket.reduce_scatter(grads, async_op=True).wait()

        def forget() -> None:
            for shard in bucket.shards:
                shard.grad = None

        step()  # makes memory
        stream.synchronize()
        forget()
        graph = played_cuda.Graph(stream)
        with graph.capture(played_cuda.Graph.THREAD):
            step()
        for seed in (10, 20):
            bucket.load(list(values(seed).values()))
            for grad, value in zip(grads, values(seed + comm.rank).values(), strict=True):
                grad.copy_(value)
            graph.launch()
            stream.synchronize()
            check_params(bucket, values(seed))
            check_grads(bucket, [values(seed + rank) for rank in range(RANKS)])
        forget()
        step()  # and one that is not captured comes after it
        stream.synchronize()
        check_grads(bucket, [values(20 + rank) for rank in range(RANKS)])

    run_ranks(body)


def captured_engine() -> None:
    """A whole step of an engine and its optimizer trains, launch by launch, as the plain model does."""
    _train_captured(RANKS, lambda rank: None)


def captured_engine_with_secondary_shards() -> None:
    """The same, of two hosts of two ranks, inside which units are gathered for backward."""
    ids = [_C.nccl_unique_id() for _ in range(2)]

    def host(rank: int) -> Communicator:
        return CoreCommunicator(_C.make_nccl(ids[rank // 2], rank % 2, 2, 0, 60.0))

    _train_captured(4, host)


def _train_captured(ranks: int, host: Callable[[int], Communicator | None]) -> None:
    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))

    steps, eager_steps = 6, 3
    torch.manual_seed(0)
    initial = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    plain = copy.deepcopy(initial)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        sum(plain(batch(step, rank)).square().mean() / ranks for rank in range(ranks)).backward()
        optimizer.step()

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        graph = played_cuda.Graph(stream)
        with played_cuda.TorchOn(stream, graph):
            ours = copy.deepcopy(initial)
            inside = host(comm.rank)
            engine = fully_shard(ours, comm, units=torch.nn.Linear, reshard_after_forward=inside)
            sgd = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9, foreach=False)
            x = torch.empty(4, 8)

            def step() -> None:
                sgd.zero_grad()
                ours(x).square().mean().backward()
                sgd.step()

            for number in range(eager_steps):
                x.copy_(batch(number, comm.rank))
                step()
            stream.synchronize()
            with graph.capture(played_cuda.Graph.THREAD):
                step()
            for number in range(eager_steps, steps):
                x.copy_(batch(number, comm.rank))
                graph.launch()
            trained = engine.full_state_dict()
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(trained[name], value)
            engine.close()
            if inside is not None:
                inside.close()

    run_ranks(body, ranks)


def event_may_be_asked_beside_a_capture() -> None:
    """One from before it, by the thread that captures and by another; it has fired, or not yet."""
    with played_cuda.Stream() as stream:
        on = _C.Stream.from_cuda(0, stream.handle)
        fired = on.record()
        stream.synchronize()
        other, gate = played_cuda.Stream(), threading.Event()
        held = other.enqueue(gate.wait)
        pending = _C.Stream.from_cuda(0, other.handle).record()
        answers: list[bool] = []

        def ask() -> None:
            answers.extend([fired.query(), pending.query()])

        graph = played_cuda.Graph(stream)
        with graph.capture():
            ask()
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        assert answers == [True, False, True, False]
        gate.set()
        other.synchronize()
        del held


def event_of_a_capture_has_not_fired_before_that_ends() -> None:
    """What is kept until then does not hold back what is kept after it for ever."""

    class Kept:
        pass

    with played_cuda.Stream() as stream:
        on = _C.Stream.from_cuda(0, stream.handle)
        graph, kept, gone = played_cuda.Graph(stream), Kept(), []
        gone.append(weakref.ref(kept))
        with graph.capture():
            inside = on.record()
            streams.keep_until(inside, kept)
            del kept
            assert not inside.query()
            streams.keep_until(inside)
            assert gone[0]() is not None
            with pytest.raises(_C.CudaError, match="an event of a capture"):
                inside.wait()
        assert inside.query()
        streams.keep_until(on.record())
        assert gone[0]() is None
        inside.wait()
        _C.Stream.cuda(0).wait(inside)


def captured_stream_waits_for_nothing_from_before() -> None:
    """What has run needs no wait; else the error says what to do, and the capture goes on."""
    with played_cuda.Stream() as stream:
        on, side = _C.Stream.from_cuda(0, stream.handle), _C.Stream.cuda(0)
        done = side.record()
        side.synchronize()
        other, gate = played_cuda.Stream(), threading.Event()
        held = other.enqueue(gate.wait)
        pending = _C.Stream.from_cuda(0, other.handle).record()
        graph = played_cuda.Graph(stream)
        with graph.capture():
            on.wait(done)
            with pytest.raises(_C.CudaError, match="before the capture began"):
                on.wait(pending)
        gate.set()
        other.synchronize()
        del held


def event_of_a_capture_tells_no_time() -> None:
    """To record a timed one is refused at once, and leaves nothing that fails later."""
    with played_cuda.Stream() as stream:
        on = _C.Stream.from_cuda(0, stream.handle)
        with (
            played_cuda.Graph(stream).capture(),
            pytest.raises(_C.CudaError, match="tells no time"),
        ):
            on.record(timed=True)
        begin, end = on.record(timed=True), on.record(timed=True)
        on.synchronize()
        end.seconds_since(begin)


def memory_in_a_capture() -> None:
    """None is made there, and what is let go of there does not end the capture."""
    # Ranks are processes elsewhere: here a capture forbids the other's thread to wait for their device.
    together = threading.Barrier(RANKS)

    def body(comm: Communicator, stream: played_cuda.Stream) -> None:
        memory = comm.allocate(64, use="gather")
        together.wait()
        with played_cuda.Graph(stream).capture(played_cuda.Graph.THREAD):
            with pytest.raises(RuntimeError, match="run the step once before it is captured"):
                comm.allocate(64, use="reduce")
            together.wait()
        together.wait()  # both have ended
        comm.barrier()  # it goes on
        together.wait()
        with played_cuda.Graph(stream).capture(played_cuda.Graph.THREAD):
            del memory
            together.wait()
        together.wait()

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


def check_params(bucket: Bucket, full: dict[str, torch.Tensor]) -> None:
    for param, value in zip(bucket.params, full.values(), strict=True):
        assert torch.equal(param.float(), value)


def check_grads(bucket: Bucket, of_ranks: list[dict[str, torch.Tensor]]) -> None:
    """They are this rank's rows of the ranks' mean."""
    mean = {name: sum(of[name] for of in of_ranks) / RANKS for name in SHAPES}
    for shard, (placement, piece) in zip(bucket.shards, bucket._placed, strict=True):
        if piece.numel:
            rows = mean[placement.spec.name][piece.start : piece.stop]
            assert torch.equal(shard.grad, rows), placement.spec.name


if __name__ == "__main__":
    globals()[sys.argv[1]]()
