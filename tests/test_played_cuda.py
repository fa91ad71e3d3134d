"""What drives a GPU from Python, over a CUDA runtime and an NCCL that are played: events, memory and captures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "bench"))
import played_cuda  # noqa: E402

CASES = [
    "gather_and_reduce",
    "two_events_a_collective",
    "memory_is_kept_until_waited_for",
    "memory_of_dropped_work_is_kept_until_done",
    "captured_bucket",
    "captured_engine",
    "event_may_be_asked_beside_a_capture",
    "event_of_a_capture_has_not_fired_before_that_ends",
    "captured_stream_waits_for_nothing_from_before",
]


@pytest.fixture(scope="module")
def extension() -> None:
    """The one over what is played."""
    try:
        played_cuda.build()
    except played_cuda.NoHeaders as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    command = [sys.executable, str(HERE / "played_cases.py"), case]
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
