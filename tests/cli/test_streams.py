"""Commands whose standard streams are closed, or read no more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DEADLINE_S = 120.0
BENCH = ["bench", "-b", "1K", "-e", "1K", "-n", "1"]


@pytest.mark.parametrize("words", [BENCH, ["plan", "--model", "gpt2", "--json", "-"]])
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_does_its_work_where_streams_are_closed(words: list[str], closed: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m shardcomm "$@" {closed}', sys.executable, *words],
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rror" not in done.stderr


def test_a_benchmark_ends_in_silence_where_its_reader_has_enough() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "shardcomm", *BENCH],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
