"""Where and when figures were measured; every report in JSON begins with it."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def provenance(command: str) -> dict[str, Any]:
    """The date, `command`, the machine and the versions, as a dict for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def machine() -> dict[str, Any]:
    """The processor, its cores and the GPU, as the system names them."""
    found: dict[str, Any] = {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()}-{_kernel()}-{platform.machine()}",
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _kernel() -> str:
    """Its version, such as 6.18, without the name of the build."""
    return ".".join(platform.release().split(".")[:2])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
