"""What drives a GPU from Python, over a CUDA runtime and an NCCL that are played: events, memory and captures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from select import select

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import played_cuda  # noqa: E402

DEADLINE_S = 120.0
CASES = {
    "played_collectives": [
        "gather_and_reduce",
        "owners_of_whole_parameters",
        "two_events_a_collective",
        "memory_is_kept_until_waited_for",
        "memory_of_dropped_work_is_kept_until_done",
        "barrier_that_was_aborted_raises",
        "bound_collectives",
        "bound_barrier_that_was_aborted_raises",
        "a_rank_tells_what_it_is_in",
    ],
    "played_captures": [
        "captured_bucket",
        "captured_engine",
        "captured_engine_with_secondary_shards",
        "event_may_be_asked_beside_a_capture",
        "event_of_a_capture_has_not_fired_before_that_ends",
        "captured_stream_waits_for_nothing_from_before",
        "event_of_a_capture_tells_no_time",
        "memory_in_a_capture",
    ],
}


@pytest.fixture(scope="module")
def extension() -> Path:
    """The one over what is played."""
    try:
        return played_cuda.build()
    except played_cuda.NoHeaders as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("extension")
def test_host_time_of_collectives_with_peers_is_reported(tmp_path: Path) -> None:
    script, file = ROOT / "bench" / "overhead.py", tmp_path / "figures.json"
    command = [sys.executable, str(script), "--device", "fake", "--rounds", "2", "--json"]
    subprocess.run([*command, str(file)], check=True, timeout=120)
    figures = json.loads(file.read_text())["figures"]
    for name in ("gather, bf16", "reduce, bf16", "reduce, f32", "step, a unit"):
        assert 0 < figures[name]["p10_s"] <= figures[name]["median_s"] <= figures[name]["p90_s"]


# Forks a process for each line that it reads, which runs that script, and prints its exit status. Torch is loaded once,
# and with it its compiler, which its optimizers load.
RUNS_SCRIPTS = """
import gc, os, pytest, runpy, sys, torch._dynamo
gc.freeze()
for line in sys.stdin:
    stderr, *sys.argv = line.split()
    if os.fork() == 0:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forks(extension: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RUNS_SCRIPTS]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a case that hangs can be ended with it
    )
    with process:
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "case"), [(script, case) for script, cases in CASES.items() for case in cases]
)
def test_case(
    forks: subprocess.Popen[str], extension: Path, script: str, case: str, tmp_path: Path
) -> None:
    assert forks.stdin is not None
    assert forks.stdout is not None
    stderr = tmp_path / "stderr"
    forks.stdin.write(f"{stderr} {ROOT / 'tests/support' / script}.py {case} {extension}\n")
    forks.stdin.flush()
    assert select([forks.stdout], [], [], DEADLINE_S)[0], f"{case} still runs"
    assert forks.stdout.readline() == "0\n", stderr.read_text()
