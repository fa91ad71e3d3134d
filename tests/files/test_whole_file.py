"""A report that a full disk, or a limit, cuts short: one sentence, exit status 1, and no half of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcomm.files.whole_file import written_whole
from shardcomm.trace.timeline import RankTimeline, Span, Timeline
from support.commands import command

PLAN = ["plan", "--params", "1e6"]


@pytest.mark.parametrize("args", [[*PLAN, "--json"], ["doctor", "--json"]], ids=["plan", "doctor"])
def test_a_full_disk_is_one_sentence(args: list[str]) -> None:
    done = command(*args, "/dev/full")
    assert done.returncode == 1
    assert done.stderr == "shardcomm: /dev/full: No space left on device\n"


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_nothing_is_left_of_what_does_not_fit(option: str, tmp_path: Path) -> None:
    file = tmp_path / ("out.png" if option == "--plot" else "out.json")
    done = command(*PLAN, "--layers", "4", option, str(file), most_bytes=2048)
    assert done.returncode == 1
    assert done.stderr == f"shardcomm: {file}: File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind_a_link(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)

    def write_half() -> None:
        with written_whole(link):
            link.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        write_half()
    assert not target.exists()


def test_a_trace_that_does_not_fit(tmp_path: Path) -> None:
    spans = tuple(Span("gather", f"unit {i}", i * 1.0, i + 0.5, 64) for i in range(100))
    timeline = Timeline((RankTimeline(0, spans, {}),), "a clock")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        timeline.save("/dev/full")


def test_what_cannot_be_opened_is_not_removed(tmp_path: Path) -> None:
    file = tmp_path / "theirs"
    file.write_text("theirs")
    with pytest.raises(PermissionError), written_whole(file):
        raise PermissionError(13, "Permission denied", str(file))
    assert file.read_text() == "theirs"
