"""Where work runs: a stream that computes, one that gathers, one or two that reduce, and events between them.

    compute   | forward u  |   wait    | forward u+1 | ...   torch's current stream; on a CPU, whoever calls
    gather      | gather u+1           | gather u+2 | ...    ours; on a CPU, a worker thread
    reduce                                                   ours
    replicate                                                ours; the all-reduce of shards that several ranks hold

What a stream waits for, its device waits for, and no host does; on a CPU that is the same.

A process that ends first lets its worker threads run the Python callables that they were given, as Python does with its
own threads; meanwhile `enqueue` raises RuntimeError, and after a second a line on stderr says what the exit waits for.
Ctrl-C drops the rest. A wait on a CPU that could never end (a callable that waits for a later event of its own stream,
or streams that wait for each other so) raises RuntimeError.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from shardcomm import _C


class Event(Protocol):
    """Fires when what its stream did before has finished, or has failed."""

    def query(self) -> bool:
        """Whether it has fired. Never blocks, never raises."""

    def wait(self) -> None:
        """Blocks the host until it has fired; raises what the stream's work raised."""

    def seconds_since(self, earlier: Any) -> float:
        """Time between two events of one device that have fired, both recorded `timed`."""


class Stream(Protocol):
    """Runs what it is given in order."""

    def enqueue(self, function: Callable[[], object]) -> None:
        """Runs `function` after all that came before; on a GPU at once, and what it launches later."""

    def record(self, timed: bool = ...) -> Event:
        """Marks this point. Only a `timed` event can tell a GPU's time."""

    def wait(self, event: Any) -> None:
        """What comes later starts after `event`."""


class Streams:
    """The streams of one rank on one device.

    Attributes:
        compute: gives the stream on which torch computes now.
        reduced: the end of the latest reduce of a bucket, until which its buffer is read; None: there was none.
    """

    def __init__(
        self,
        device: torch.device,
        gather: Stream | None = None,
        reduce: Stream | None = None,
        replicate: Stream | None = None,
    ) -> None:
        self.device = device
        self.gather = gather or _new_stream(device)
        self.reduce = reduce or _new_stream(device)
        self.compute = computing(device)
        self.reduced: Event | None = None
        self._on_host = on_host(device)
        self._replicate = replicate

    @cached_property
    def replicate(self) -> Stream:
        """Made when first needed: few strategies do."""
        return self._replicate or _new_stream(self.device)

    def computed(self) -> Stream | None:
        """The stream that computes, for what is to come after it; None on a CPU, where it has been computed."""
        return None if self._on_host else self.compute()

    def after_compute(self, stream: Stream) -> None:
        """What `stream` does next, it does after all that was computed so far."""
        if not self._on_host:
            stream.wait(self.compute().record())


def on_host(device: torch.device) -> bool:
    """Whether the host itself computes on `device`: a CPU, unless that plays a GPU."""
    return device.type == "cpu" and _C.host_device < 0


def core_index(device: torch.device) -> int:
    """The number that the core has for `device`: a GPU's own, -1 for the host."""
    return _C.host_device if device.type == "cpu" else device.index


def compute_stream(device: torch.device) -> Stream:
    """The stream of `device` on which torch computes now; on a CPU, the caller itself."""
    return computing(device)()


@cache
def computing(device: torch.device) -> Callable[[], Stream]:
    """`compute_stream` of one device, for who asks in every step."""
    if on_host(device):
        return lambda: _CALLER
    if not uses_core(device):
        return lambda: TorchStream(torch.accelerator.current_stream(device))
    index = core_index(device)
    current = torch._C._cuda_getCurrentRawStream  # a tenth of current_stream's time
    borrowed: dict[int, _C.Stream] = {}  # torch has a fixed pool of them

    def compute() -> Stream:
        handle = current(index)
        stream = borrowed.get(handle)
        if stream is None:
            stream = borrowed[handle] = _C.Stream.from_cuda(index, handle)
        return stream

    return compute


def start_stream(device: torch.device) -> None:
    """A stream of its own for this thread's work on a GPU; nothing on a CPU."""
    if device.type == "cuda":  # a thread's current stream lasts as long as the thread
        torch.cuda.set_device(device)
        torch.accelerator.set_stream(torch.Stream(device))


def copy(to: torch.Tensor, source: torch.Tensor, stream: Stream) -> Event:
    """Queues the copy of a flat tensor between host and device, or within either; the event of its end.

    Memory of the host that is not pinned is copied as well, but a GPU's host then waits for it.
    """
    if isinstance(stream, TorchStream):
        stream.enqueue(lambda: to.copy_(source, non_blocking=True))
    else:
        assert isinstance(stream, _C.Stream)
        stream.copy(to.data_ptr(), source.data_ptr(), source.nbytes)
    event = stream.record()
    keep_until(event, to, source)
    return event


def keep_until(event: Event, *objects: object) -> None:
    """Holds on to `objects`, whatever their owner does, until `event` has fired and somebody calls this again.

    For what nobody waits for; who does, as `Work`, holds on to them that long.
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
    """Whether the compiled core drives `device`: the CPU always, a CUDA GPU if it was built for it."""
    return device.type == "cpu" or (device.type == "cuda" and _C.cuda_built)


class TorchStream:
    """A stream of a device that the core does not drive."""

    def __init__(self, stream: torch.Stream) -> None:
        self.torch_stream = stream

    def enqueue(self, function: Callable[[], object]) -> None:
        """See Stream."""
        with self.torch_stream:
            function()

    def record(self, timed: bool = False) -> TorchEvent:
        """See Stream."""
        event = torch.Event(self.torch_stream.device, enable_timing=timed)
        event.record(self.torch_stream)
        return TorchEvent(event)

    def wait(self, event: TorchEvent) -> None:
        """See Stream."""
        event.torch_event.wait(self.torch_stream)


class TorchEvent:
    """An event of a TorchStream."""

    def __init__(self, event: torch.Event) -> None:
        self.torch_event = event

    def query(self) -> bool:
        """See Event."""
        return self.torch_event.query()

    def wait(self) -> None:
        """See Event."""
        self.torch_event.synchronize()

    def seconds_since(self, earlier: TorchEvent) -> float:
        """See Event."""
        return earlier.torch_event.elapsed_time(self.torch_event) * 1e-3


def _new_stream(device: torch.device) -> Stream:
    if on_host(device):
        return _C.Stream()
    if uses_core(device):
        return _C.Stream.cuda(core_index(device))
    return TorchStream(torch.Stream(device, priority=-1))


_CALLER = _C.Stream.caller()
_kept: deque[tuple[Event, tuple[object, ...]]] = deque()
_kept_lock = threading.RLock()  # what the collector ends in here may come here, too
