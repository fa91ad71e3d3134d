"""The protocol between ranks holds in every order of its steps (docs/protocol.md)."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory and futexes are Linux's")
def test_protocol_holds_in_every_order_of_its_steps():
    check = [sys.executable, str(REPOSITORY / "tests" / "cpp" / "model" / "check.py")]
    run = subprocess.run(check, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert len(run.stdout.splitlines()) > 10  # a line for each program
