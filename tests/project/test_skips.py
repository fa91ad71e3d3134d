"""`--not-skipped`, with which .ci/run finds out that what it has installed is not tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PROGRAM = """
import pytest

def test_of_a_gpu():
    pytest.skip("no GPU here")

@pytest.mark.skipif(True, reason="needs: pip install jax")
def test_of_jax():
    pass

@pytest.mark.xfail
def test_that_fails():
    assert False
"""


def test_what_is_skipped_for_such_a_reason_fails(tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    (tmp_path / "test_module.py").write_text(
        "import pytest\npytest.importorskip('no_such_module', reason='needs: pip install it')\n"
    )
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-c", os.devnull),
            *("--continue-on-collection-errors", "--not-skipped", "pip install|no compiler"),
        ],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert "1 skipped, 1 xfailed, 2 errors" in ran.stdout
    for needed in ("jax", "it"):
        told = f"needs: pip install {needed}: --not-skipped=pip install|no compiler forbids that"
        assert told in ran.stdout
