"""The rate of the link between GPUs as its maker states it. It is not measured."""

from __future__ import annotations

import re
import subprocess

# The GB/s of a lane in one direction, after line coding, for each PCI Express generation.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


def nominal_link() -> str | None:
    """The links of the first GPU, as "NVLink, 18 x 26.562 GB/s = 478 GB/s"; None if nvidia-smi does not tell."""
    rates = [
        float(rate)
        for rate in re.findall(
            r"Link \d+: ([\d.]+) GB/s", _nvidia_smi("nvlink", "--status", "-i", "0")
        )
    ]
    if rates:
        return f"NVLink, {len(rates)} x {rates[0]:g} GB/s = {sum(rates):.0f} GB/s"
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    match = re.match(r"(\d+), (\d+)", _nvidia_smi(query, "--format=csv,noheader", "-i", "0"))
    if match is None or int(match[1]) not in _PCIE_LANE:
        return None
    generation, lanes = int(match[1]), int(match[2])
    return f"PCI Express {generation} x{lanes}, {_PCIE_LANE[generation] * lanes:.0f} GB/s"


def _nvidia_smi(*args: str) -> str:
    """The output of nvidia-smi; "" if there is none, or if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *args], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
