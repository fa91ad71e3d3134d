"""bench/gpu.sh without a GPU: its steps over an interpreter that only says what it was asked to run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 600  # ten minutes
FILES = {
    "a": {"gpu-a.log", "gpu_kernels.json"},
    "b": {"gpu-b.log", "gpu_overhead.json", "nccl.txt"},
    "c": {"gpu-c.log", *(f"gpu_engine_{part}.json" for part in ("alone", "offloaded", "threads"))},
}
PYTHON = """#!/bin/sh
case "$*" in
*sys.executable*) echo "$0"; exit ;;
esac
if [ -n "$FAILING" ] && echo "$*" | grep -qe "$FAILING"; then
    echo "Traceback of $FAILING"; exit 1
fi
[ -z "${NCCL_DEBUG_FILE:-}" ] || echo "what NCCL warned of" >"${NCCL_DEBUG_FILE%\\%p}$$"
while [ $# -gt 1 ]; do
    [ "$1" != --json ] || echo "{}" >"$2"
    shift
done
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with a python, an nvidia-smi and a compute-sanitizer that do nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "python": PYTHON,
        "nvidia-smi": "#!/bin/sh\necho 9.0\n",
        "compute-sanitizer": "#!/bin/sh\n",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(machine: Path, stage: str, failing: str = "") -> tuple[int, str, Path]:
    """The exit status, what was printed, and the folder of results."""
    out = machine.parent / "out"
    done = subprocess.run(
        [ROOT / "bench/gpu.sh", stage, out],
        env=os.environ | {
            "PATH": f"{machine}:{os.environ['PATH']}",
            "PYTHON": str(machine / "python"),
            "FAILING": failing,
        },
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout, out


@pytest.mark.parametrize("stage", ["a", "b", "c"])
def test_a_stage_fits_its_time_and_leaves_its_files(machine: Path, stage: str) -> None:
    status, printed, out = run(machine, stage)
    assert status == 0, printed
    assert {file.name for file in out.iterdir()} == FILES[stage]
    assert (out / f"gpu-{stage}.log").read_text() == printed
    (limit,) = re.findall(r"\(limits: (\d+) s\)", printed)
    assert int(limit) < LIMIT_S


@pytest.mark.parametrize(
    ("stage", "failing", "step"),
    [("a", "test_copy_cuda", "kernels"), ("a", "gpu_kernels", "figures"), ("c", "pip", "build")],
)
def test_the_log_ends_with_the_traceback_of_what_failed(
    machine: Path, stage: str, failing: str, step: str
) -> None:
    status, printed, out = run(machine, stage, failing)
    assert status == 1
    end = rf"== the end of {step}\nTraceback of {failing}\n\nstage {stage}: .*; failed: {step}\n$"
    assert re.search(end, printed), printed
    assert (out / f"gpu-{stage}.log").read_text() == printed


def test_a_build_that_fails_ends_the_stage(machine: Path) -> None:
    _, printed, _ = run(machine, "c", "pip")
    assert "== alone" not in printed


def test_a_fault_of_torchs_group_does_not_end_the_stage(machine: Path) -> None:
    status, printed, _ = run(machine, "b", "torchs_own")
    assert status == 1
    assert "== overhead" in printed


def test_ranks_that_do_not_meet_end_the_stage_with_what_nccl_said(machine: Path) -> None:
    _, printed, out = run(machine, "b", "two_ranks")
    assert "== overhead" not in printed
    assert "what NCCL warned of" in printed
    assert "what NCCL warned of" in (out / "nccl.txt").read_text()


def test_the_stages_run_every_file_with_gpu_tests(machine: Path) -> None:
    printed = "".join(run(machine, stage)[1] for stage in "ab")
    marked = [
        file.name
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu", file.read_text())
    ]
    assert marked
    assert set(re.findall(r"test_\w+\.py", printed)) >= set(marked)


def test_without_jax_its_tests_are_left_out(machine: Path) -> None:
    status, printed, _ = run(machine, "b", "jax.devices")
    assert status == 0, printed
    assert "test_jax.py" not in printed
    assert "jax: left out" in printed


def test_a_wrong_call_is_answered_with_the_usage(machine: Path) -> None:
    done = subprocess.run(
        [ROOT / "bench/gpu.sh", "d", machine], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "bench/gpu.sh a OUT" in done.stderr
