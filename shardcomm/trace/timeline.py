"""A timeline: what all ranks computed, gathered and reduced, on one clock. Perfetto shows its file.

    rank 0   step     | step 7                                                  |
             compute  | forward blocks.0 |      | forward blocks.1 | ...
             waiting                     | w. |                      computation stands still: exposed communication
             gather   | blocks.1              |
             reduce
             all_reduce                                        of shards that several ranks hold
    rank 1   ...

The file is Chrome's JSON trace format, a process for each rank and a thread for each row; https://ui.perfetto.dev,
chrome://tracing and `shardcomm trace` read it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardcomm.files.json_file import Value, read_json
from shardcomm.files.whole_file import written_whole

ROWS = ("step", "compute", "waiting", "gather", "reduce", "all_reduce")
COMMUNICATION = ("gather", "reduce", "all_reduce")
SIMULATED = "simulated"
"""The clock of a timeline that nobody has measured."""

_MOST_RANKS = 10**9
_MOST_US = 1e15  # of a trace: thirty years


class Span(NamedTuple):
    """Something that a rank did.

    Attributes:
        row: The row that shows it, one of `ROWS`.
        name: What it was.
        begin_s: When it began, in seconds since the timeline's beginning.
        end_s: When it ended.
        nbytes: How many bytes it communicated.
    """

    row: str
    name: str
    begin_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True)
class RankTimeline:
    """One rank's spans, and for each row of communication the path that it took."""

    rank: int
    spans: tuple[Span, ...]
    paths: dict[str, str]


class Figures(NamedTuple):
    """The sums of a rank's timeline, in seconds and bytes.

    Attributes:
        rank: The rank.
        steps: How many steps were marked; 0 if none were.
        total_s: The time of all steps; without steps, from the first span to the last.
        exposed_s: How long computation waited for communication.
        gather_s: How long gathers took.
        reduce_s: How long reduces and all-reduces took.
        gathered_bytes: What the rank received by gathers.
        reduced_bytes: What the rank sent by reduces and all-reduces.
        hidden: The part of the time with communication in which computation did not wait, from 0 to 1.
    """

    rank: int
    steps: int
    total_s: float
    exposed_s: float
    gather_s: float
    reduce_s: float
    gathered_bytes: int
    reduced_bytes: int
    hidden: float

    @property
    def compute_s(self) -> float:
        """The time that is not exposed communication."""
        return self.total_s - self.exposed_s


@dataclass(frozen=True)
class Timeline:
    """All ranks' timelines in order.

    Attributes:
        ranks: The timelines.
        clock: A sentence about how their times compare.
        units: How many elements the parameters of each of the model's units have; empty where nobody has said it.
        tokens: How many tokens a rank computes in a step; 0 where nobody has said it.
    """

    ranks: tuple[RankTimeline, ...]
    clock: str
    units: Mapping[str, int] = field(default_factory=dict)
    tokens: int = 0

    @classmethod
    def of(cls, ranks: Sequence[RankTimeline], clocks: Sequence[tuple[str, float]]) -> Timeline:
        """Brings the ranks onto one clock, which is 0 where the first of them began.

        Args:
            ranks: Each rank's timeline on a clock of its own.
            clocks: For each rank its host, and the time on that host's clock when the rank's own clock was 0, in
                seconds.
        """
        hosts = {host for host, _ in clocks}
        # Clocks of different hosts have nothing in common, but all ranks begin to trace at the same step.
        zero = {host: min(origin for of, origin in clocks if of == host) for host in hosts}
        shifted = (
            _shifted(each, origin - zero[host])
            for each, (host, origin) in zip(ranks, clocks, strict=True)
        )
        clock = (
            "one host's, for all ranks"
            if len(hosts) == 1
            else f"of {len(hosts)} hosts, set to 0 where the first rank of each began"
        )
        return cls(tuple(shifted), clock)

    def save(self, path: str | Path) -> None:
        """Writes the timeline to a file, in Chrome's JSON trace format.

        Raises:
            OSError: The file cannot be written; then no part of it is left.
        """
        document = {
            "displayTimeUnit": "ms",
            "otherData": {
                "clock": self.clock,
                "receipts": {str(each.rank): each.paths for each in self.ranks},
                "step": {"units": dict(self.units), "tokens": self.tokens},
            },
            "traceEvents": [event for each in self.ranks for event in _events(each)],
        }
        text = json.dumps(document, separators=(",", ":")) + "\n"
        with written_whole(path):
            Path(path).write_text(text)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Reads a file that `save` wrote.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is something else, or there is no event in it.
        """
        document = read_json(
            path,
            "a trace of shardcomm's, which `shardcomm train --trace` and Timeline.save write",
        )
        other = document["otherData"]
        ranks = _ranks(document["traceEvents"], other["receipts"])
        clock = other["clock"].text()
        units, tokens = {}, 0
        if "step" in other.raw:  # older files have none
            units = {
                name: numel.whole(0, 1 << 60) for name, numel in other["step"]["units"].items()
            }
            tokens = other["step"]["tokens"].whole(0, 1 << 60)
        if not any(each.spans for each in ranks):
            raise ValueError(f"{path} is a trace in which nothing happens")
        return cls(ranks, clock, units, tokens)

    def figures(self) -> list[Figures]:
        """The figures of each rank."""
        return [_figures(each) for each in self.ranks]

    def steps(self) -> list[str]:
        """The names of the steps, in order; an empty list if none were marked."""
        return [span.name for span in self.ranks[0].spans if span.row == "step"]

    def median_step(self) -> str:
        """The name of rank 0's step of median duration."""
        steps = [span for span in self.ranks[0].spans if span.row == "step"]
        return sorted(steps, key=lambda span: span.end_s - span.begin_s)[len(steps) // 2].name

    def only(self, step: str) -> Timeline:
        """The spans that began in the step of this name, on each rank.

        Raises:
            ValueError: A rank has no step of this name, or several.
        """

        def cut(each: RankTimeline) -> RankTimeline:
            marked = [s for s in each.spans if s.row == "step" and s.name == step]
            if len(marked) != 1:
                raise ValueError(
                    f"rank {each.rank} has {len(marked)} steps that are {step!r}, not one"
                )
            (whole,) = marked
            inside = (s for s in each.spans if whole.begin_s <= s.begin_s < whole.end_s)
            return replace(each, spans=tuple(inside))

        return replace(self, ranks=tuple(map(cut, self.ranks)))


def _shifted(each: RankTimeline, by_s: float) -> RankTimeline:
    spans = (
        span._replace(begin_s=span.begin_s + by_s, end_s=span.end_s + by_s) for span in each.spans
    )
    return replace(each, spans=tuple(spans))


def _events(each: RankTimeline) -> Iterable[dict[str, Any]]:
    process = {"ph": "M", "pid": each.rank}
    yield {**process, "name": "process_name", "args": {"name": f"rank {each.rank}"}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": each.rank}}
    for tid, row in enumerate(ROWS):
        yield {**process, "name": "thread_name", "tid": tid, "args": {"name": row}}
        yield {**process, "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}}
    for span in each.spans:
        args: dict[str, object] = {}
        if span.row in COMMUNICATION:
            args = {"bytes": span.nbytes, "path": each.paths.get(span.row, "")}
        yield {
            "name": span.name,
            "ph": "X",
            "pid": each.rank,
            "tid": ROWS.index(span.row),
            "ts": round(span.begin_s * 1e6, 3),  # microseconds, to the nanosecond
            "dur": round((span.end_s - span.begin_s) * 1e6, 3),
            "args": args,
        }


def _ranks(events: Value, receipts: Value) -> tuple[RankTimeline, ...]:
    paths = {
        _rank(rank, of): {row: path.text() for row, path in of.items()}
        for rank, of in receipts.items()
    }
    spans: dict[int, list[Span]] = {rank: [] for rank in paths}
    for event in events:
        if event["ph"].text() != "X":
            continue
        rank = event["pid"].whole(0, _MOST_RANKS)
        if rank not in spans:
            raise event["pid"].wrong(f"a rank with receipts: {reprlib.repr(list(spans))}")
        spans[rank].append(_span(event))
    return tuple(
        RankTimeline(rank, tuple(done), paths[rank]) for rank, done in sorted(spans.items())
    )


def _rank(text: str, value: Value) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise value.wrong(f"under the number of a rank, not under {text!r}")
    return int(text)


def _span(event: Value) -> Span:
    args = event["args"]
    row = ROWS[event["tid"].whole(0, len(ROWS) - 1)]
    begin, duration = (event[key].number(0, _MOST_US) * 1e-6 for key in ("ts", "dur"))
    nbytes = args["bytes"].whole(0, 1 << 60) if row in COMMUNICATION else 0
    return Span(row, event["name"].text(), begin, begin + duration, nbytes)


def _figures(each: RankTimeline) -> Figures:
    of = {row: [span for span in each.spans if span.row == row] for row in ROWS}
    seconds = {row: sum(span.end_s - span.begin_s for span in spans) for row, spans in of.items()}
    communicating = _union(span for row in COMMUNICATION for span in of[row])
    communicating_s = _length(communicating)
    exposed_s = _length(_both(communicating, _union(of["waiting"])))
    whole_s = max((s.end_s for s in each.spans), default=0.0) - min(
        (s.begin_s for s in each.spans), default=0.0
    )
    return Figures(
        rank=each.rank,
        steps=len(of["step"]),
        total_s=seconds["step"] if of["step"] else whole_s,
        exposed_s=seconds["waiting"],
        gather_s=seconds["gather"],
        reduce_s=seconds["reduce"] + seconds["all_reduce"],
        gathered_bytes=sum(span.nbytes for span in of["gather"]),
        reduced_bytes=sum(span.nbytes for span in of["reduce"] + of["all_reduce"]),
        hidden=1 - exposed_s / communicating_s if communicating_s else 1.0,
    )


Intervals = list[tuple[float, float]]


def _union(spans: Iterable[Span]) -> Intervals:
    """The intervals in which any of `spans` went on: disjoint, and in order."""
    union: Intervals = []
    for begin, end in sorted((span.begin_s, span.end_s) for span in spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def _both(a: Intervals, b: Intervals) -> Intervals:
    """The intervals in which both `a` and `b` went on. Each of the two must be disjoint and in order."""
    both: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            both.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def _length(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)
