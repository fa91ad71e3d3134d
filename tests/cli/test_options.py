"""What options accept, where several commands have them: files to be written, and sizes of memory."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcomm.cli.options import can_write, check_outputs, memory


def test_a_file_to_be_written_need_not_be_there(tmp_path: Path) -> None:
    assert can_write(str(tmp_path / "new.json"))
    assert can_write("/dev/null")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("path", ["", ".", "/nowhere/x", "new/", "x" * 300, "file/x", "loop"])
def test_what_no_file_can_be_written_to(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    assert not can_write(path)


def test_a_link_to_a_file_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    link = tmp_path / "latest.json"
    link.symlink_to("run7.json")
    assert can_write(str(link))
    assert [*tmp_path.iterdir()] == [link]
    assert link.is_symlink()
    link.unlink()
    link.symlink_to("nowhere/run7.json")
    assert not can_write(str(link))


def test_a_pipe_is_not_opened_before_there_is_something_to_write(tmp_path: Path) -> None:
    """To open one waits for its reader, and to close it again tells the reader that this was all."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        assert can_write(str(pipe))
        writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(writer, b"all of it")
        os.close(writer)
        assert reader.read() == b"all of it"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": "a", "csv": "a"}, "--json and --csv are both a; each must be a file of its own"),
        ({"json": "-", "csv": "-"}, "--json and --csv are both -; each must be"),
        ({"trace": "-"}, "--trace is '-'; it must be a file that can be written"),
        ({"json": "/no/where"}, "--json is '/no/where'; it must be a file that can be written, or"),
    ],
)
def test_outputs_are_files_of_their_own(
    given: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("json", "csv", "trace")
    args = SimpleNamespace(**(dict.fromkeys(names) | given))
    with pytest.raises(SystemExit):
        check_outputs(argparse.ArgumentParser(), args, *names)  # type: ignore[arg-type]
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40GB", 40e9), ("512 MB", 512e6), ("80GiB", 80 * 2**30), ("1.5k", 1500), ("7 B", 7)],
)
def test_sizes_of_memory(text: str, nbytes: float) -> None:
    assert memory(text) == nbytes


@pytest.mark.parametrize("text", ["9" * 400 + "B", "1000000TB"])
def test_a_memory_that_nobody_has_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="it must be a size with its unit"):
        memory(text)
