"""Whatever is in a file that a command reads, the command says one sentence about it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcomm import __main__ as program
from shardcomm.cli.bench import compare
from shardcomm.cli.bench.options import layers
from shardcomm.files.json_file import read_json
from shardcomm.trace.timeline import RankTimeline, Span, Timeline

FIGURE = {"time_s": 1e-5, "spread": {"p10_s": 0.9e-5, "p90_s": 1.1e-5}}
ROW = {"layer": None, "size_bytes": 1024, "out_of_place": FIGURE, "in_place": None}
NAMES = {"operation": "all_gather", "transport": "shm", "device": "cpu", "dtype": "float"}
RESULT = {"ranks": 2, "sections": [{**NAMES, "redop": "none", "root": -1, "rows": [ROW]}]}
SPAN = {"name": "step 1", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 5.5, "args": {}}
TRACE = {
    "otherData": {"clock": "c", "receipts": {"0": {"gather": "window"}}},
    "traceEvents": [SPAN],
}
SHAPES = {"weight": [768, 768], "bias": [768]}

READERS: dict[str, tuple[Callable[[str], object], Any]] = {
    "compare": (compare.read, RESULT),
    "trace": (Timeline.load, TRACE),
    "shapes": (layers, SHAPES),
}


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["shardcomm", *args])
    try:
        return program.main()
    except SystemExit as ended:
        return int(ended.code or 0)


DEEP = "[" * 100_000
COMMANDS = [("trace", "{file}"), ("bench", "--compare", "{file}", "{file}"),
            ("bench", "--op", "gather", "--shapes", "{file}")]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DEEP, "its JSON is nested too deeply"),
        ('{"traceEvents":' * 100_000, "its JSON is nested too deeply"),
        ("{", "it is not JSON"),
        ("\udcff\udcfe", "it is not JSON"),
        ("9" * 5000, "it is not JSON"),
        ("[]", "it must be an object"),
        ("null", "it must be an object"),
        ("NaN", "it must be an object"),
    ],
    ids=["deep list", "deep object", "half", "bytes", "digits", "list", "null", "nan"],
)
def test_commands_say_what_is_wrong(
    command: tuple[str, ...],
    content: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert run(monkeypatch, *(part.format(file=file) for part in command)) in (1, 2)
    said = capsys.readouterr().err
    assert f"{file} is not " in said
    assert message in said
    assert "Traceback" not in said


def places(value: Any) -> list[tuple[str | int, ...]]:
    """Of everything in it."""
    inside = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    return [(), *((key, *place) for key, each in inside for place in places(each))]


def replaced(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    if not place:
        return new
    copy = json.loads(json.dumps(value))
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(
    SCALARS | st.sampled_from([10**400, -1, 1e308, "\ud800", "-1", "٣", 2**63]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_one_value_that_is_another(name: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    """Either it is right, and then all that is made of it is, or a sentence names the file."""
    read, right = READERS[name]
    place = data.draw(st.sampled_from(places(right)))
    file = tmp_path_factory.getbasetemp() / f"{name}.json"
    file.write_text(json.dumps(replaced(right, place, data.draw(ANYTHING))))
    found, said = None, str(file)
    try:
        found = read(str(file))
    except (ValueError, argparse.ArgumentTypeError) as error:
        said = str(error)
    assert str(file) in said
    if isinstance(found, Timeline):
        assert all(figures.total_s >= 0 for figures in found.figures())
        str(found.steps()).encode()
    if isinstance(found, compare.Run) and found.figures:
        compare.screen(compare.compare(found, found), 0.1).encode()


def test_what_the_commands_write_is_read(tmp_path: Path) -> None:
    spans = (Span("step", "step 1", 0.0, 2.0, 0), Span("gather", "blocks.0", 0.5, 1.0, 64))
    timeline = Timeline((RankTimeline(0, spans, {"gather": "window"}),), "a clock")
    timeline.save(tmp_path / "trace.json")
    assert Timeline.load(tmp_path / "trace.json") == timeline
    (tmp_path / "shapes.json").write_text(json.dumps(SHAPES))
    (layer,) = layers(str(tmp_path / "shapes.json"))
    assert layer.shapes == {"weight": (768, 768), "bias": (768,)}


def test_a_place_is_named() -> None:
    with pytest.raises(ValueError, match=r"/dev/null is not a thing: it is not JSON"):
        read_json("/dev/null", "a thing")


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("compare", ("sections", 0, "rows", 0, "out_of_place", "time_s"), 0,
         "['sections'][0]['rows'][0]['out_of_place']['time_s'] is 0; it must be a number from 1e-12 to 1e+09"),
        ("compare", ("sections", 0, "transport"), ["shm"], "['transport'] is ['shm']; it must be a printable text"),
        ("trace", ("traceEvents", 0, "tid"), -1, "['tid'] is -1; it must be a whole number from 0 to 5"),
        ("trace", ("traceEvents", 0, "pid"), 7, "['pid'] is 7; it must be a rank with receipts: [0]"),
        ("trace", ("traceEvents", 0, "dur"), -1, "['dur'] is -1; it must be a number from 0 to 1e+15"),
        ("shapes", ("bias",), [2**40, 2**40], "together"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(
    name: str, place: tuple[str | int, ...], value: object, message: str, tmp_path: Path
) -> None:
    read, right = READERS[name]
    file = tmp_path / "file.json"
    file.write_text(json.dumps(replaced(right, place, value)))
    with pytest.raises((ValueError, argparse.ArgumentTypeError)) as caught:
        read(str(file))
    assert message in str(caught.value)
