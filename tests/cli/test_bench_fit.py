"""Latency and bandwidth, as `shardcomm bench --fit` finds them in measured times, and what a link is said to have."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from shardcomm.cli.bench.fit import fit
from shardcomm.cli.bench.gpu_link import nominal_link


def test_fit_finds_latency_and_bandwidth() -> None:
    points = [(1 << n, 5e-6 + (1 << n) / 8e9) for n in range(10, 27, 2)]
    found = fit(points)
    assert found is not None
    assert found.alpha_s == pytest.approx(5e-6)
    assert found.beta_s == pytest.approx(1 / 8e9)
    assert found.worst_error < 1e-9


def test_fit_minimises_relative_errors(seed: int) -> None:
    """Against numpy's least squares on rows divided by the time."""
    noise = random.Random(seed)
    points = [(1 << n, (5e-6 + (1 << n) / 8e9) * noise.uniform(0.9, 1.1)) for n in range(10, 27)]
    found = fit(points)
    rows = np.array([[1 / t, size / t] for size, t in points])
    expected, *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
    assert found is not None
    assert (found.alpha_s, found.beta_s) == pytest.approx(tuple(expected))
    errors = np.abs(rows @ expected - 1)
    assert found.rms_error == pytest.approx(np.sqrt((errors**2).mean()))
    assert found.worst_error == pytest.approx(errors.max())


def test_fit_has_no_negative_term() -> None:
    falling = fit([(1000, 3e-6), (2000, 2e-6), (4000, 1e-6)])
    steep = fit([(1000, 1e-6), (2000, 4e-6), (4000, 16e-6)])
    assert falling is not None
    assert steep is not None
    assert falling.beta_s == 0.0 < falling.alpha_s
    assert steep.alpha_s == 0.0 < steep.beta_s


def test_two_sizes_are_no_fit() -> None:
    assert fit([(1000, 1e-6), (2000, 2e-6), (1000, 1.1e-6)]) is None


NVLINK = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""


@pytest.mark.parametrize(
    ("nvlink", "pcie", "expected"),
    [
        (NVLINK, "5, 16", "NVLink, 2 x 26.562 GB/s = 53 GB/s"),
        ("", "4, 16", "PCI Express 4 x16, 32 GB/s"),
        ("", "[N/A], [N/A]", None),
    ],
)
def test_nominal_link_is_what_nvidia_smi_states(
    nvlink: str, pcie: str, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n[ $1 = nvlink ] && printf '{nvlink}' || echo '{pcie}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert nominal_link() == expected


def test_no_nvidia_smi_is_no_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nominal_link() is None
