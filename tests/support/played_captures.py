"""What test_played_cuda.py runs of captures in CUDA graphs, each function in a process of its own.

PYTHONPATH=tests python -m support.played_captures NAME [EXTENSION]
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

# isort: split
# Before shardcomm, whose extension it replaces.
from support.played_ranks import RANKS, check_grads, check_params, played_cuda, run_ranks, values

# isort: split
from shardcomm import _C, Bucket, Communicator, fully_shard
from shardcomm.comm.core import CoreCommunicator
from shardcomm.stream import streams


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


if __name__ == "__main__":
    globals()[sys.argv[1]]()
