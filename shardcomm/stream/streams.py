"""Where work runs: a stream that computes, one that gathers, one or two that reduce, and events between them.

    compute   | forward u  |   wait    | forward u+1 | ...   torch's current stream; on a CPU, whoever calls
    gather      | gather u+1           | gather u+2 | ...    ours; on a CPU, a worker thread
    reduce                                                   ours
    replicate                                                ours; the all-reduce of shards that several ranks hold

When a stream waits for an event, its device waits, and the host goes on. On a CPU the stream's thread waits.

When a process ends, its worker threads first run the Python callables that they were given, as Python's own threads do.
Meanwhile `enqueue` raises RuntimeError, and after a second a line on stderr says what the exit waits for. Ctrl-C drops
the rest. A wait on a CPU that could never end raises RuntimeError: a callable that waits for a later event of its own
stream, or streams that wait for each other in a circle.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from shardcomm import _C


class AnyEvent(Protocol):
    """A point in a stream's work. It fires when all work before that point has finished or failed."""

    def query(self) -> bool:
        """Whether the event has fired. It never blocks and never raises."""

    def wait(self) -> None:
        """Blocks the host until the event has fired; raises what the stream's work has raised."""

    def seconds_since(self, earlier: Any) -> float:
        """The seconds from `earlier` to this event: both of one device, fired, and recorded with `timed=True`."""


class AnyStream(Protocol):
    """Runs the work that it is given, in order."""

    def enqueue(self, function: Callable[[], object]) -> None:
        """Runs `function` after all earlier work. On a GPU it runs at once, and the kernels that it launches do so."""

    def record(self, timed: bool = ...) -> AnyEvent:
        """An event at this point. Only a `timed` event can tell a GPU's time."""

    def wait(self, event: Any) -> None:
        """Makes later work of this stream start after `event`."""


class Streams:
    """The streams of one rank on one device.

    Args:
        device: The device.
        gather: The stream for gathers. None: a new one.
        reduce: The stream for reduces. None: a new one.
        replicate: The stream for all-reduces among replicas. None: a new one, made when it is first needed.

    Attributes:
        device: As given.
        gather: The stream on which gathers are queued.
        reduce: The stream on which reduces are queued.
        compute: A function that returns the stream on which torch computes now.
        reduced: The end of the latest reduce of a bucket, whose buffer is read until then; None: there was none.
    """

    def __init__(
        self,
        device: torch.device,
        gather: AnyStream | None = None,
        reduce: AnyStream | None = None,
        replicate: AnyStream | None = None,
    ) -> None:
        self.device = device
        self.gather = gather or _new_stream(device)
        self.reduce = reduce or _new_stream(device)
        self.compute = computing(device)
        self.reduced: AnyEvent | None = None
        self._on_host = on_host(device)
        self._replicate = replicate

    @cached_property
    def replicate(self) -> AnyStream:
        """The stream on which all-reduces among replicas are queued. It is made at first use; few strategies use it."""
        return self._replicate or _new_stream(self.device)

    def computed(self) -> AnyStream | None:
        """The stream on which torch computes, for work that must come after it.

        None on a CPU, where everything has been computed by the time of the call.
        """
        return None if self._on_host else self.compute()

    def after_compute(self, stream: AnyStream) -> None:
        """Makes later work of `stream` start after all that was computed so far."""
        if not self._on_host:
            stream.wait(self.compute().record())


def on_host(device: torch.device) -> bool:
    """Whether the host itself computes on `device`: a CPU does, unless it plays a GPU in tests."""
    return device.type == "cpu" and _C.host_device < 0


def core_index(device: torch.device) -> int:
    """The core's number for `device`: a GPU's own, and -1 for the host."""
    return _C.host_device if device.type == "cpu" else device.index


def compute_stream(device: torch.device) -> AnyStream:
    """The stream of `device` on which torch computes now; on a CPU, the caller itself."""
    return computing(device)()


@cache
def computing(device: torch.device) -> Callable[[], AnyStream]:
    """A function that returns `compute_stream(device)`, for callers that ask in every step."""
    if on_host(device):
        return lambda: _CALLER
    if not uses_core(device):
        return lambda: TorchStream(torch.accelerator.current_stream(device))
    index = core_index(device)
    current = torch._C._cuda_getCurrentRawStream  # takes a tenth of current_stream's time
    borrowed: dict[int, _C.Stream] = {}  # does not grow: torch has a fixed pool of streams

    def compute() -> AnyStream:
        handle = current(index)
        stream = borrowed.get(handle)
        if stream is None:
            stream = borrowed[handle] = _C.Stream.from_cuda(index, handle)
        return stream

    return compute


def start_stream(device: torch.device) -> None:
    """Gives this thread a stream of its own for its work on a GPU; does nothing on a CPU."""
    if device.type == "cuda":  # a thread's current stream lasts as long as the thread
        torch.cuda.set_device(device)
        torch.accelerator.set_stream(torch.Stream(device))


def copy(to: torch.Tensor, source: torch.Tensor, stream: AnyStream) -> AnyEvent:
    """Queues the copy of a flat tensor between host and device, or within either; returns the event of its end.

    Host memory that is not pinned is copied as well, but the host then waits for a GPU's copy.
    """
    if isinstance(stream, TorchStream):
        stream.enqueue(lambda: to.copy_(source, non_blocking=True))
    else:
        assert isinstance(stream, _C.Stream)
        stream.copy(to.data_ptr(), source.data_ptr(), source.nbytes)
    event = stream.record()
    keep_until(event, to, source)
    return event


def keep_until(event: AnyEvent, *objects: object) -> None:
    """Keeps `objects` alive, whatever their owner does, until `event` has fired and somebody calls this again.

    For work for which nobody may wait. A `Work` keeps the objects itself until it has been waited for. Objects go in
    the order in which they came: those whose event has not fired hold back all that came later.
    """
    with _kept_lock:
        while _kept and _kept[0][0].query():
            _kept.popleft()
        _kept.append((event, objects))


def check_stream(operation: str, stream: object) -> None:
    """TypeError unless `stream` is one of shardcomm's."""
    if not isinstance(stream, (_C.Stream, TorchStream)):
        raise TypeError(
            f"{operation}: stream is a {type(stream).__name__}; it must be a shardcomm.Stream (of a torch.cuda.Stream: "
            "shardcomm.Stream.from_cuda(index, stream.cuda_stream)), or None"
        )


def uses_core(device: torch.device) -> bool:
    """Whether the compiled core drives `device`: the CPU always, and a CUDA GPU if the core was built with CUDA."""
    return device.type == "cpu" or (device.type == "cuda" and _C.cuda_built)


class TorchStream:
    """A stream of a device that the core does not drive."""

    def __init__(self, stream: torch.Stream) -> None:
        self.torch_stream = stream

    def enqueue(self, function: Callable[[], object]) -> None:
        """See AnyStream."""
        with self.torch_stream:
            function()

    def record(self, timed: bool = False) -> TorchEvent:
        """See AnyStream."""
        event = torch.Event(self.torch_stream.device, enable_timing=timed)
        event.record(self.torch_stream)
        return TorchEvent(event)

    def wait(self, event: TorchEvent | _C.Event) -> None:
        """See AnyStream."""
        if isinstance(event, TorchEvent):
            event.torch_event.wait(self.torch_stream)
        else:  # the host's, of which nothing is on a device
            event.wait()


class TorchEvent:
    """An event of a TorchStream."""

    def __init__(self, event: torch.Event) -> None:
        self.torch_event = event

    def query(self) -> bool:
        """See AnyEvent."""
        return self.torch_event.query()

    def wait(self) -> None:
        """See AnyEvent."""
        self.torch_event.synchronize()

    def seconds_since(self, earlier: TorchEvent) -> float:
        """See AnyEvent."""
        return earlier.torch_event.elapsed_time(self.torch_event) * 1e-3


def _new_stream(device: torch.device) -> AnyStream:
    if on_host(device):
        return _C.Stream()
    if uses_core(device):
        return _C.Stream.cuda(core_index(device))
    return TorchStream(torch.Stream(device, priority=-1))


_CALLER = _C.Stream.caller()
FIRED: AnyEvent = _CALLER.record()
"""An event that has fired, for which a stream of any device can wait."""

_kept: deque[tuple[AnyEvent, tuple[object, ...]]] = deque()
_kept_lock = threading.RLock()  # reentrant: a Work that the collector ends in here comes here, too
