"""What this build and this machine have, what is missing and why, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import torch
import torch.distributed as dist

import shardcomm
from shardcomm import _C
from shardcomm.cli.doctor.memory import shared_memory
from shardcomm.comm import nccl
from shardcomm.files.provenance import provenance
from shardcomm.interop import backend

_SHOW_GPU = (
    "for a GPU, install the driver, or let this container have the GPUs (docker run --gpus all)"
)
_TEST_HOSTS = (
    "to test it: shardcomm cluster --hosts 2 --ranks 2 --rate 1gbit -- "
    "shardcomm bench --transport hosts"
)
_INSTALL_NCCL = "pip install nvidia-nccl-cu13 (-cu12 where nvidia-smi shows CUDA 12)"


def findings() -> dict[str, Any]:
    """The versions, and for CUDA, NCCL, Triton, the backend and each transport whether it can be used.

    An entry that cannot be used has a `reason` and a `remedy`; in the others both are "".
    """
    cuda, library = _C.cuda_status(), nccl.status()
    reason, _, remedy = cuda.reason.partition("; ")  # a build without CUDA says what to do, too
    gpu = _state(cuda.available, reason, remedy or _SHOW_GPU)
    loaded = _state(library.available, library.reason, _INSTALL_NCCL)
    system = provenance("shardcomm doctor")
    return {
        **system,
        "versions": {"shardcomm": shardcomm.__version__, **system["versions"]},
        "cuda": {
            **gpu,
            "built": cuda.built,
            "runtime_version": _dotted(cuda.runtime_version),
            "driver_version": _dotted(cuda.driver_version),
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "nccl": {
            **loaded,
            "version": _nccl_version(library.version),
            "path": library.path,
            "missing": list(library.missing),
        },
        "triton": _triton(),
        "backend": _backend(),
        "transports": {
            "shm": _state(sys.platform == "linux", "it needs Linux", "use c10d"),
            "local": _state(True),
            "local:cuda": gpu,
            "nccl": loaded if gpu["usable"] else gpu,
            "hosts": _state(False, "its ranks are on several hosts", _TEST_HOSTS),
            "c10d:gloo": _state(
                dist.is_available() and dist.is_gloo_available(),
                "this torch is built without Gloo",
                "install a torch that has it",
            ),
        },
        "shared_memory": shared_memory(),
    }


def _state(usable: bool, reason: str = "", remedy: str = "") -> dict[str, Any]:
    if usable:
        reason = remedy = ""
    return {"usable": usable, "reason": reason, "remedy": remedy}


def _triton() -> dict[str, Any]:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return {**_state(False, "not installed", "pip install triton"), "version": ""}
    return {**_state(True), "version": version}


def _backend() -> dict[str, Any]:
    """Whether the backend of torch.distributed is compiled; this compiles it."""
    try:
        backend.load()
    except (OSError, ImportError, RuntimeError) as error:
        return _state(False, str(error), "install g++ 11 or newer (Debian: apt install g++)")
    return _state(True)


def _dotted(version: int) -> str:
    """CUDA's 13010 as "13.1"; "" for none."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def _nccl_version(version: int) -> str:
    """NCCL's 22703 as "2.27.3"; "" for none."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else ""
