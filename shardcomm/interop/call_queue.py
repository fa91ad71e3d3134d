"""Collectives as torch.distributed begins them: a `CallQueue` runs them in order, and a `BackendWork` tells their end.

synchronous, nothing queued before    run by the caller, who waits anyway
asynchronous, or behind such          run on the queue's thread
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.futures import Future

from shardcomm import _C
from shardcomm.stream.streams import Event, Stream
from shardcomm.stream.work import Work

# A function that queues a collective on a stream, or runs it if there is no stream.
Run = Callable[[Stream | None], None]

_NO_TIMEOUT = timedelta(0)


class BackendWork(dist.Work):
    """A collective that was begun. `wait` raises what the collective raises, as often as it is called."""

    def __init__(self, queue: CallQueue, event: Event | None, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._queue = queue
        self._event = event
        self._results = results
        self._future: Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Blocks until this rank's part is done; at most for `timeout`, if that is not zero.

        Raises:
            TimeoutError: The collective is not done within `timeout`; it goes on.
            CommError: A rank died, called something else or did not come within the group's own timeout.
        """
        if self._event is not None:
            Work(self._event).wait(None if timeout == _NO_TIMEOUT else timeout)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._event is None or self._event.query()

    def result(self) -> list[torch.Tensor]:
        """The tensors that the collective writes."""
        return self._results

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Completes with the tensors that the collective writes, or with what `wait` raises."""
        if self._future is None:

            def finished(_: Future[None]) -> list[torch.Tensor]:
                self.wait()
                return self._results

            # An error has to be raised inside of `then`: only so C++, in which DDP waits, sees it as an error.
            begun: Future[None] = Future()
            self._future = begun.then(finished)
            if self.is_completed():
                begun.set_result(None)
            else:
                self._queue.completions.enqueue(lambda: begun.set_result(None))
        return self._future


class CallQueue:
    """Runs collectives in the order of their calls: on a thread, or by the caller if nothing is queued before."""

    def __init__(self) -> None:
        self.last: Event | None = None

    @cached_property
    def stream(self) -> _C.Stream:
        """The stream on which asynchronous collectives run."""
        return _C.Stream()

    @cached_property
    def completions(self) -> _C.Stream:
        """The stream that waits for collectives whose futures somebody has asked for."""
        return _C.Stream()

    def idle(self) -> bool:
        """Whether all that was queued has finished."""
        return self.last is None or self.last.query()

    def begin(self, run: Run, asynchronous: bool, results: list[torch.Tensor]) -> BackendWork:
        """Queues `run`; a synchronous one is finished on return."""
        if not asynchronous and self.idle():
            run(None)
            return BackendWork(self, None, results)
        run(self.stream)
        self.last = self.stream.record()
        if not asynchronous:
            self.last.wait()
        return BackendWork(self, self.last, results)

    def drain(self) -> None:
        """Waits for all that was queued, whether it succeeds or not."""
        if self.last is not None:
            with suppress(Exception):
                self.last.wait()

    def stop(self) -> None:
        """Waits as `drain`, and for the callbacks of the futures."""
        self.drain()
        if "completions" in vars(self):
            self.completions.synchronize()


class Flat:
    """Tensors of one dtype as one flat tensor: a view of them if they lie one after the other, else a copy.

    Args:
        tensors: The tensors.
        copied: Whether it is a copy in any case.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, copied: bool = False) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._copied = copied or not _consecutive(self._tensors)
        numel = sum(tensor.numel() for tensor in tensors)
        first = self._tensors[0]
        self.flat = (
            torch.empty(numel, dtype=first.dtype)
            if self._copied
            else first.as_strided((numel,), (1,))
        )

    def load(self, stream: Stream | None) -> None:
        """Copies the tensors' values into `flat`, unless that is a view of them."""
        if self._copied:
            do(stream, lambda: copy_all(self._parts()))

    def store(self, stream: Stream | None) -> None:
        """Copies `flat`'s values into the tensors, unless it is a view of them."""
        if self._copied:
            do(stream, lambda: copy_all([(tensor, part) for part, tensor in self._parts()]))

    def _parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pieces = torch.split(self.flat, [tensor.numel() for tensor in self._tensors])
        return [
            (piece.view(tensor.shape), tensor)
            for piece, tensor in zip(pieces, self._tensors, strict=True)
        ]


def do(stream: Stream | None, function: Callable[[], object]) -> None:
    """Queues `function` on `stream`, or calls it if there is no stream."""
    if stream is None:
        function()
    else:
        stream.enqueue(function)


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second tensor of each pair to the first."""
    with torch.inference_mode():  # so that it may write to tensors of that mode, on any thread
        for target, source in pairs:
            target.copy_(source)


def _consecutive(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each tensor is contiguous, begins where the one before it ends, and its memory holds its values."""
    first = tensors[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != address:
            return False
        if tensor.is_neg() or tensor.is_conj():
            return False
        if tensor.untyped_storage().data_ptr() != storage:
            return False
        address += tensor.numel() * tensor.element_size()
    return True
