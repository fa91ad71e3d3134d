"""The options that the scripts in bench/ share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import arguments


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments("Measures.").parse_args(["--json", "/nowhere/x"])
    assert "argument --json: '/nowhere/x'; it must be a file that can be written, or -" in (
        capsys.readouterr().err
    )
    assert arguments("Measures.").parse_args(["--json", "-"]).json == "-"
