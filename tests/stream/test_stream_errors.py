"""An operation on a stream that raises: who waits for it, or comes after it, hears of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardcomm import CudaError, Stream


def test_error_in_a_stream_skips_what_is_queued_behind_it() -> None:
    ran: list[int] = []
    stream = Stream()

    def fail() -> None:
        raise LookupError("lost")

    stream.enqueue(lambda: ran.append(1))
    stream.enqueue(fail)
    stream.enqueue(lambda: ran.append(2))
    with pytest.raises(LookupError, match="lost"):
        stream.synchronize()
    assert ran == [1]


def test_an_error_in_a_stream_is_raised_to_all_who_wait() -> None:
    stream = Stream()

    def fail() -> None:
        raise LookupError("lost")

    stream.enqueue(fail)
    events = [stream.record(), stream.record()]
    for event in (*events, *events):
        with pytest.raises(LookupError, match="lost"):
            event.wait()


def test_a_stream_waits_for_an_event_and_for_nothing_else() -> None:
    with pytest.raises(TypeError):
        Stream().wait(None)  # type: ignore[arg-type]  # what a collective without a stream returns


@pytest.mark.parametrize(
    "make", [Stream.cuda, lambda device: Stream.from_cuda(device, 0)], ids=["cuda", "from_cuda"]
)
@pytest.mark.parametrize("device", [-1, 1 << 20])
def test_a_stream_of_a_gpu_that_is_not_there_is_refused(
    make: Callable[[int], Stream], device: int
) -> None:
    with pytest.raises((CudaError, ValueError), match=rf"no CUDA;|device is (cuda:)?{device}[:;]"):
        make(device)
