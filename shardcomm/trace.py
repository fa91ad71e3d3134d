"""A trace of what one rank computes, gathers and reduces, as Perfetto and chrome://tracing show it.

Times come from events on the streams themselves, so on a GPU they are the device's, and nothing waits for it::

    compute   | forward blocks.0 |      | forward blocks.1 | ...
    waiting                      | w. |                            computation stands still: exposed communication
    gather        | blocks.1          |
    reduce
    all_reduce                                               of shards that several ranks hold
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shardcomm.streams import Event, Stream, Streams

ROWS = ("compute", "waiting", "gather", "reduce", "all_reduce")


class Span(NamedTuple):
    """Something that a rank did. Times are seconds since the trace began, `nbytes` what it communicated."""

    row: str
    name: str
    begin_s: float
    end_s: float
    nbytes: int


class Trace:
    """What happened on one rank since this was made; see `Engine.trace`."""

    def __init__(self, rank: int, streams: Streams) -> None:
        self.rank = rank
        self._streams = streams
        self._origin = streams.compute().record(timed=True)
        self._spans: list[tuple[str, str, Event, Event, int]] = []

    @contextmanager
    def span(self, row: str, name: str, stream: Stream, nbytes: int = 0) -> Iterator[None]:
        """What is queued on `stream` in here, which follows all that was computed so far."""
        self._streams.after_compute(stream)
        begin = stream.record(timed=True)
        yield
        self.add(row, name, begin, stream.record(timed=True), nbytes)

    def add(self, row: str, name: str, begin: Event, end: Event, nbytes: int = 0) -> None:
        """`name` went on between two events of one stream."""
        self._spans.append((row, name, begin, end, nbytes))

    def spans(self) -> list[Span]:
        """In the order in which they were issued. Waits until they have ended."""
        for *_, end, _ in self._spans:
            end.wait()
        origin = self._origin
        return [
            Span(row, name, begin.seconds_since(origin), end.seconds_since(origin), nbytes)
            for row, name, begin, end, nbytes in self._spans
        ]

    @property
    def exposed_s(self) -> float:
        """Seconds that computation stood still, waiting for communication."""
        return sum(span.end_s - span.begin_s for span in self.spans() if span.row == "waiting")

    def save(self, path: str | Path) -> None:
        """Writes Chrome's JSON trace format (https://ui.perfetto.dev reads it): a process for the rank, a row each."""
        names: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": self.rank, "tid": tid, "args": {"name": row}}
            for tid, row in enumerate(ROWS)
        ]
        process = {"name": f"rank {self.rank}"}
        names.append({"name": "process_name", "ph": "M", "pid": self.rank, "args": process})
        events: list[dict[str, object]] = [
            {
                "name": span.name,
                "ph": "X",
                "pid": self.rank,
                "tid": ROWS.index(span.row),
                "ts": span.begin_s * 1e6,
                "dur": (span.end_s - span.begin_s) * 1e6,
                "args": {"bytes": span.nbytes} if span.nbytes else {},
            }
            for span in self.spans()
        ]
        Path(path).write_text(json.dumps({"traceEvents": names + events}) + "\n")
