"""Some of torch's own tests, run by bench/torch_tests.py: what passes with Gloo passes with the backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="torch's own tests import it")

ROOT = Path(__file__).parents[2]
# What the profiler sees, forms without options in a hook, timeouts, sub-groups, messages from any source.
CHOSEN = {
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_reduce_sum_complex",
    "test_barrier_timeout_full_group",
    "test_monitored_barrier_gloo_subgroup",
    "test_send_recv_any_source",
}


@pytest.mark.slow
def test_what_passes_with_gloo_passes_with_the_backend(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "bench/torch_tests.py", "--check", "--json", told),
            *("--only", rf"\.({'|'.join(CHOSEN)})$", "--deadline-s", "60"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {"gloo": "passed", "shardcomm": "passed"}
    assert json.loads(told.read_text())["figures"] == {
        f"distributed_case: TestDistributed.{name}": passed for name in CHOSEN
    }


def test_a_test_that_passes_with_gloo_alone_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    import torch_tests

    verdicts = {
        "distributed_case: A.test_both": {"gloo": "passed", "x": "passed"},
        "distributed_case: A.test_gloo": {"gloo": "passed", "x": "failed: no"},
        "distributed_case: A.test_skipped": {"gloo": "passed"},
        "distributed_case: A.test_ddp_logging_data_cpu": {"gloo": "passed", "x": "failed: custom"},
        "distributed_case: A.test_neither": {"gloo": "failed: no", "x": "failed: no"},
        "distributed_case: A.test_x": {"gloo": "failed: no", "x": "passed"},
        "tensor/test_ops: B.test_both": {"gloo": "passed", "x": "passed"},
    }
    report = torch_tests.tally(verdicts, "x")
    assert [row[1:] for row in report.rows] == [
        ["4", "1", "1", "1"],
        ["1", "1", "0", "0"],
        ["5", "2", "1", "1"],
    ]
    assert [bound.value for bound in report.bounds] == [2, 0, 2]
    assert [bound.holds for bound in report.bounds] == [False, True, False]
