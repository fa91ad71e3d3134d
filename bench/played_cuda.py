"""GPUs that this process plays: shardcomm over the CUDA runtime and the NCCL of tests/cpp/cuda.

CPU tensors are then those of device 0. What is queued runs on threads, in the order of streams and events; with
`instant` nothing of it runs and nobody waits for anybody, so that what is left is the host's time.

    import played_cuda

    played_cuda.install()  # before shardcomm is imported
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "on_fakes"


class NoHeaders(RuntimeError):
    """CUDA's headers are not on this machine, and the extension cannot be built."""


def install(*, instant: bool = False) -> None:
    """Builds the extension where that is due, and puts it in the place of `shardcomm._C`.

    Raises:
        NoHeaders: there is nothing to build it with; it says why.
    """
    if "shardcomm" in sys.modules:
        raise RuntimeError(
            "played_cuda: shardcomm has been imported already; install() goes before"
        )
    path = build()
    if instant:  # the library reads it when it is loaded
        os.environ.update(FAKE_CUDA_INSTANT="1", FAKE_NCCL_INSTANT="1")
    loader = ExtensionFileLoader("shardcomm._C", str(path))
    spec = importlib.util.spec_from_loader("shardcomm._C", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules["shardcomm._C"] = module
    # As torch does where it has CUDA. One of the driver's own: the default stream cannot be captured.
    torch._C._cuda_getCurrentRawStream = _current  # type: ignore[attr-defined]
    status = module.nccl_status([str(BUILD / "libnccl.so.2")])
    assert status.available, status.reason


def build() -> Path:
    """The extension's file, made from what the sources are now."""
    cmake = str(Path(sys.executable).parent / "cmake")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run side by side
        if not (BUILD / "build.ninja").exists():
            options = ["-DSHARDCOMM_TESTS=ON", "-DSHARDCOMM_CUDA=off"]
            python = f"-DPython_EXECUTABLE={sys.executable}"
            _run(cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), *options, python)
        if "_C_on_fakes" not in _run(cmake, "--build", str(BUILD), "--target", "help"):
            raise NoHeaders("CUDA's headers (12.8 or newer) are not on this machine")
        _run(cmake, "--build", str(BUILD), "--target", "_C_on_fakes", "-j2")
    return next(BUILD.glob("_C_on_fakes*.so"))


@contextmanager
def computing_on(handle: int) -> Iterator[None]:
    """In here, this thread computes on the stream of this handle."""
    before, _threads.stream = _current(0), handle
    try:
        yield
    finally:
        _threads.stream = before


class _Threads(threading.local):
    stream = 0


_threads = _Threads()


def _current(index: int) -> int:
    return _threads.stream


def _run(*command: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, check=False, text=True, capture_output=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"played_cuda: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
