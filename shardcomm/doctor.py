"""`shardcomm doctor`: what is built, what is loaded, what is missing and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardcomm
from shardcomm import _C, nccl


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what works on this machine, and what does not and why",
        description="Says what this build of shardcomm has, what it finds on this machine, and which transports and "
        "kernels can be used; for each that cannot, why, and what to do.",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the findings there instead; - for stdout"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 1 if FILE could not be written."""
    found = findings()
    if args.json is None:
        print(screen(found))
        return 0
    text = json.dumps(found, indent=1) + "\n"
    try:
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text)
    except OSError as error:
        print(f"shardcomm doctor: --json {args.json}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def findings() -> dict[str, Any]:
    """Versions, and for CUDA, NCCL, Triton and each transport: whether it can be used, and if not, why."""
    cuda, library = _C.cuda_status(), nccl.status()
    on_gpu = None if cuda.available else cuda.reason
    return {
        "versions": {
            "shardcomm": shardcomm.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "cuda": {
            "built": cuda.built,
            "available": cuda.available,
            "reason": cuda.reason,
            "runtime_version": _dotted(cuda.runtime_version),
            "driver_version": _dotted(cuda.driver_version),
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "nccl": {
            "available": library.available,
            "version": _nccl_version(library.version),
            "path": library.path,
            "reason": library.reason,
            "missing": list(library.missing),
        },
        "triton": _triton(),
        "transports": {
            "shm": _usable(None if sys.platform == "linux" else "it needs Linux"),
            "local": _usable(None),
            "local on a GPU": _usable(on_gpu),
            "nccl": _usable(on_gpu or (None if library.available else library.reason)),
            "c10d": _usable(None if dist.is_available() else "this torch has no torch.distributed"),
        },
    }


def screen(found: dict[str, Any]) -> str:
    """The findings for people."""
    cuda, library = found["cuda"], found["nccl"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    rows = [
        ("versions", versions),
        ("machine", found["machine"]["system"]),
        ("CUDA kernels", f"built with {cuda['runtime_version']}" if cuda["built"] else "not built"),
        ("GPUs", ", ".join(cuda["devices"]) or f"none: {cuda['reason']}"),
        (
            "NCCL",
            f"{library['version']}, {library['path']}"
            if library["available"]
            else f"none: {library['reason']}; pip install nvidia-nccl-cu13, or -cu12",
        ),
        *(("", f"too old for {entry}") for entry in library["missing"]),
        ("Triton", found["triton"]["version"] or f"none: {found['triton']['reason']}"),
    ]
    rows += [
        (f"transport {name}", "can be used" if state["usable"] else f"no: {state['reason']}")
        for name, state in found["transports"].items()
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _usable(reason: str | None) -> dict[str, Any]:
    return {"usable": reason is None, "reason": reason or ""}


def _triton() -> dict[str, str]:
    try:
        return {"version": importlib.metadata.version("triton"), "reason": ""}
    except importlib.metadata.PackageNotFoundError:
        return {"version": "", "reason": "not installed; pip install triton"}


def _dotted(version: int) -> str:
    """CUDA's 13010 as "13.1"; "" for none."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def _nccl_version(version: int) -> str:
    """NCCL's 22703 as "2.27.3"; "" for none."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else ""
