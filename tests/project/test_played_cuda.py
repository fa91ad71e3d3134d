"""What drives a GPU from Python, over a CUDA runtime and an NCCL that are played: events, memory and captures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import played_cuda  # noqa: E402

CASES = [
    "gather_and_reduce",
    "owners_of_whole_parameters",
    "two_events_a_collective",
    "memory_is_kept_until_waited_for",
    "memory_of_dropped_work_is_kept_until_done",
    "captured_bucket",
    "captured_engine",
    "captured_engine_with_secondary_shards",
    "event_may_be_asked_beside_a_capture",
    "event_of_a_capture_has_not_fired_before_that_ends",
    "captured_stream_waits_for_nothing_from_before",
    "event_of_a_capture_tells_no_time",
    "memory_in_a_capture",
    "barrier_that_was_aborted_raises",
    "bound_collectives",
    "bound_barrier_that_was_aborted_raises",
    "a_rank_tells_what_it_is_in",
]


@pytest.fixture(scope="module")
def extension() -> None:
    """The one over what is played."""
    try:
        played_cuda.build()
    except played_cuda.NoHeaders as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("extension")
def test_host_time_of_collectives_with_peers_is_reported(tmp_path: Path) -> None:
    script, file = ROOT / "bench" / "overhead.py", tmp_path / "figures.json"
    command = [sys.executable, str(script), "--device", "fake", "--rounds", "2", "--json"]
    subprocess.run([*command, str(file)], check=True, timeout=120)
    figures = json.loads(file.read_text())["figures"]
    for name in ("gather, bf16", "reduce, bf16", "reduce, f32", "step of the engine, a unit"):
        assert 0 < figures[name]["p10_s"] <= figures[name]["median_s"] <= figures[name]["p90_s"]


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "played_cases.py"), case]
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
