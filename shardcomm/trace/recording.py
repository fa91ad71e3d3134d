"""A trace records what one rank computes, gathers and reduces. All ranks' traces together are a `Timeline`.

Times come from events on the streams themselves. So on a GPU they are the device's times, and nothing waits for the
events except the beginning and the end of the trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from shardcomm.comm.introduction import host_identity
from shardcomm.comm.mesh import Mesh
from shardcomm.comm.texts import all_gather_text
from shardcomm.stream.streams import AnyEvent, AnyStream, Streams
from shardcomm.trace.timeline import RankTimeline, Span, Timeline


class Trace:
    """What has happened on this rank since the trace began; `Engine.trace` makes it."""

    def __init__(self, mesh: Mesh, streams: Streams, units: Mapping[str, int]) -> None:
        self._mesh = mesh
        self._units = units  # and how many elements the parameters of each have
        self._streams = streams
        self._origin, self._origin_s = _origin(streams.compute())
        self._spans: list[tuple[str, str, AnyEvent, AnyEvent, int]] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context around a step of the training loop. With steps, the timeline's figures are per step."""
        begin = self._streams.compute().record(timed=True)
        yield
        self.add("step", f"step {number}", begin, self._streams.compute().record(timed=True))

    @contextmanager
    def span(self, row: str, name: str, stream: AnyStream, nbytes: int = 0) -> Iterator[None]:
        """A context that records the work which is queued on `stream` in it, after all that was computed so far."""
        self._streams.after_compute(stream)
        begin = stream.record(timed=True)
        yield
        self.add(row, name, begin, stream.record(timed=True), nbytes)

    def add(self, row: str, name: str, begin: AnyEvent, end: AnyEvent, nbytes: int = 0) -> None:
        """Records that `name` went on between two events of one stream."""
        self._spans.append((row, name, begin, end, nbytes))

    def spans(self) -> list[Span]:
        """All spans, in the order in which they were issued. Waits until they have ended."""
        for *_, end, _ in self._spans:
            end.wait()
        origin = self._origin
        return [
            Span(row, name, begin.seconds_since(origin), end.seconds_since(origin), nbytes)
            for row, name, begin, end, nbytes in self._spans
        ]

    @property
    def exposed_s(self) -> float:
        """For how many seconds computation stood still and waited for communication."""
        return sum(span.end_s - span.begin_s for span in self.spans() if span.row == "waiting")

    def timeline(self) -> Timeline:
        """All ranks' traces on one clock, on every rank; collective."""
        own = [host_identity(), self._origin_s, self.spans(), _paths(self._mesh)]
        with self._mesh.failing_together:
            everybody = all_gather_text((self._mesh.shard, self._mesh.replicate), json.dumps(own))
        clocks, ranks = [], []
        for rank, (host, origin_s, spans, paths) in enumerate(map(json.loads, everybody)):
            clocks.append((host, origin_s))
            ranks.append(RankTimeline(rank, tuple(Span(*span) for span in spans), paths))
        return replace(Timeline.of(ranks, clocks), units=self._units)


def _origin(stream: AnyStream) -> tuple[AnyEvent, float]:
    """An event of now, and its time on the host's clock in seconds. Of several tries it takes the most exact one."""
    tries = []
    for _ in range(8):
        before = time.monotonic()
        event = stream.record(timed=True)
        event.wait()
        after = time.monotonic()
        tries.append((after - before, (before + after) / 2, event))
    _, origin_s, event = min(tries, key=lambda each: each[0])
    return event, origin_s


def _paths(mesh: Mesh) -> dict[str, str]:
    """For each row of communication the path that it took, and why it was not a faster one."""
    row_of = {
        (mesh.shard, "all_gather"): "gather",
        (mesh.shard, "reduce_scatter"): "reduce",
        (mesh.replicate, "all_reduce"): "all_reduce",
    }
    return {
        row_of[comm, receipt.operation]: ": ".join(filter(None, (receipt.taken, receipt.reason)))
        for comm in (mesh.shard, mesh.replicate)
        for receipt in comm.receipts()
        if comm.size > 1 and (comm, receipt.operation) in row_of
    }
