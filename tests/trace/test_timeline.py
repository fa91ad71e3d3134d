"""Timelines: what they amount to, by hand; their file; and `shardcomm train --trace` with `shardcomm trace`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardcomm.cli import trace as timeline_command
from shardcomm.cli.simulate import command as simulate_command
from shardcomm.cli.train import command as train_command
from shardcomm.trace.timeline import RankTimeline, Span, Timeline
from support.train_runs import SMALL

#           0    1    2    3    4    5    6    7    8    9    10
# compute   [ a       ]         [ b            ]
# waiting             [ wait    ]                   [    ]
# gather         [              ]
# reduce                                  [              ]
BY_HAND = (
    Span("step", "step 4", 0.0, 10.0, 0),
    Span("compute", "a", 0.0, 2.0, 0),
    Span("gather", "b", 1.0, 4.0, 100),
    Span("waiting", "gather b", 2.0, 4.0, 0),
    Span("compute", "b", 4.0, 7.0, 0),
    Span("reduce", "b", 6.0, 9.0, 30),
    Span("waiting", "reduce b", 8.0, 9.0, 0),
)


def status(*args: str) -> int:
    """The exit status of `shardcomm ARGS`, run in this process."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    train_command.add_parser(commands)
    simulate_command.add_parser(commands)
    timeline_command.add_parser(commands)
    try:
        parsed = parser.parse_args(args)
        found: int = parsed.run(parsed)
    except SystemExit as refused:
        return int(refused.code or 0)
    return found


def by_hand() -> Timeline:
    other = RankTimeline(1, BY_HAND, {"gather": "window"})
    mine = RankTimeline(0, BY_HAND, {"gather": "window", "reduce": "staged: private memory"})
    return Timeline.of([mine, other], [("here", 50.0), ("here", 50.25)])


def test_figures_are_those_counted_by_hand() -> None:
    for figures in by_hand().figures():
        assert figures.steps == 1
        assert figures.total_s == pytest.approx(10)
        assert figures.exposed_s == pytest.approx(3)
        assert figures.compute_s == pytest.approx(7)
        assert (figures.gather_s, figures.reduce_s) == (pytest.approx(3), pytest.approx(3))
        assert (figures.gathered_bytes, figures.reduced_bytes) == (100, 30)
        assert figures.hidden == pytest.approx(0.5)  # 3 of 6 seconds


def test_ranks_of_a_host_share_its_clock_and_hosts_begin_at_once() -> None:
    ranks = [RankTimeline(rank, BY_HAND, {}) for rank in range(4)]
    clocks = [("a", 7.0), ("a", 7.5), ("b", 300.25), ("b", 300.0)]
    timeline = Timeline.of(ranks, clocks)
    assert [each.spans[0].begin_s for each in timeline.ranks] == [0.0, 0.5, 0.25, 0.0]
    assert "2 hosts" in timeline.clock


def test_one_step_alone() -> None:
    later = tuple(
        span._replace(begin_s=span.begin_s + 20, end_s=span.end_s + 21) for span in BY_HAND
    )
    spans = (*BY_HAND, later[0]._replace(name="step 5"), *later[1:])
    timeline = Timeline.of([RankTimeline(0, spans, {})], [("here", 0.0)])
    assert timeline.steps() == ["step 4", "step 5"]
    assert timeline.only("step 4").ranks[0].spans == BY_HAND
    assert timeline.only("step 5").ranks[0].spans[1:] == later[1:]
    assert timeline.median_step() == "step 5"


def test_file_is_in_chromes_format_and_reads_back(tmp_path: Path) -> None:
    timeline = by_hand()
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e["name"] in ("process_name", "thread_name")
    }
    assert names[1, None] == "rank 1"
    shown = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    for event, span in zip(shown, BY_HAND, strict=True):
        assert event["name"] == span.name
        assert names[1, event["tid"]] == span.row
        assert event["ts"] == pytest.approx((span.begin_s + 0.25) * 1e6)  # microseconds
        assert event["dur"] == pytest.approx((span.end_s - span.begin_s) * 1e6)
        assert event["args"].get("bytes", 0) == span.nbytes

    again = Timeline.load(tmp_path / "trace.json")
    assert again.clock == timeline.clock
    for read, written in zip(again.ranks, timeline.ranks, strict=True):
        assert (read.rank, read.paths) == (written.rank, written.paths)
        for one, other in zip(read.spans, written.spans, strict=True):
            assert (one.row, one.name, one.nbytes) == (other.row, other.name, other.nbytes)
            assert one[2:4] == pytest.approx(other[2:4])


@pytest.mark.slow
def test_the_trace_of_a_training_is_taken_for_the_same_step_simulated(
    text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, given = str(tmp_path / "t.json"), ("--width", "64", "--layers", "1", "--context", "16")
    steps = ("--ranks", "1", "--batch", "3", *given)
    assert status("train", *steps, "--steps", "3", "--text", text_file, "--trace", file) == 0
    simulated = ("simulate", "--model", "gpt", *steps, "--strategy", "full_shard")
    assert status(*simulated, "--times", file) == 0
    assert status(*simulated, "--width", "128", "--times", file) == 2
    assert "the trace is of another model: its '(root)' has" in capsys.readouterr().err
    assert status(*simulated, "--batch", "4", "--times", file) == 2
    assert "the trace is of steps of 48 tokens a rank" in capsys.readouterr().err


@pytest.mark.covers("tracing", transports=["shm"])
@pytest.mark.slow
def test_training_is_traced_and_the_trace_agrees_with_its_report(
    text_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report, picture = (str(tmp_path / name) for name in ("t.json", "r.json", "p.png"))
    assert status("train", *SMALL, "--text", text_file, "--trace", file, "--json", report) == 0
    result = json.loads(Path(report).read_text())
    timeline = Timeline.load(file)
    assert timeline.steps() == ["step 2", "step 3", "step 4", "step 5"]  # of 6; two warm up
    assert [each.rank for each in timeline.ranks] == [0, 1]
    figures = timeline.figures()[0]
    assert figures.steps == result["measured_steps"]
    assert figures.exposed_s / 4 == pytest.approx(result["exposed_s"], rel=1e-2)
    # Each reads the clock for itself, and between the two a rank may lose its core.
    assert figures.total_s / 4 == pytest.approx(result["step_s"], rel=0.1)
    assert figures.gathered_bytes // 4 == result["gathered_bytes"]
    assert figures.reduced_bytes // 4 == result["reduced_bytes"]

    assert status("trace", file, "--step", "3", "--plot", picture) == 0
    assert "gather by window" in capsys.readouterr().out
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
    for bad, expected, message in (
        (["--step", "1"], 1, "--step is 1; the trace has step 2 to step 5"),
        (["--plot", str(tmp_path / "p.word")], 2, "it must end in .png, .svg, .pdf"),
        (["--step", "-1"], 2, "argument --step: '-1'; it must be a whole number from 0"),
        (["--plot", str(tmp_path / "no" / "p.png")], 2, "it must be a file that can be written"),
    ):
        assert status("trace", file, *bad) == expected
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "is not a trace of shardcomm's"),
        ("[]", "is not a trace of shardcomm's"),
        ('{"traceEvents": []}', "is not a trace of shardcomm's"),
        (
            '{"traceEvents": [{"ph": "X", "tid": 99}], "otherData": {"clock": "", "receipts": {}}}',
            "is not a trace of shardcomm's",
        ),
        (
            '{"traceEvents": [], "otherData": {"clock": "", "receipts": {}}}',
            "a trace in which nothing happens",
        ),
    ],
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    assert status("trace", str(file)) == 1
    assert message in capsys.readouterr().err


def test_output_that_cannot_be_written_is_the_output_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    by_hand().save(file)
    command = f"{sys.executable} -m shardcomm trace {file}"
    full, closed = (
        subprocess.run(
            ["sh", "-c", command + to], capture_output=True, text=True, check=False, timeout=60
        )
        for to in (" >/dev/full", " >&-")
    )
    assert (full.returncode, full.stderr) == (1, "shardcomm: No space left on device\n")
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_trace_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("trace", "") == 2
    assert "argument FILE: ''; it must not be empty" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (str(tmp_path / "no" / "t.json"), "-"):
        assert status("train", "--trace", file) == 2
        said = f"--trace is {file!r}; it must be a file that can be written"
        assert said in capsys.readouterr().err
