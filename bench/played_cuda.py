"""GPUs that this process plays: shardcomm over the CUDA runtime and the NCCL of tests/cpp/cuda.

CPU tensors are then those of device 0. What is queued runs on threads, in the order of streams and events; with
`instant` nothing of it runs and nobody waits for anybody, so that what is left is the host's time.

    import played_cuda

    played_cuda.install()  # before shardcomm is imported
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parent.parent
# That of `make setup`, which has compiled most of the core already.
BUILD = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"


class NoHeaders(RuntimeError):
    """CUDA's headers are not on this machine, and the extension cannot be built."""


def install(*, instant: bool = False, extension: Path | None = None) -> None:
    """Puts the extension in the place of `shardcomm._C`: this one, which `build` has made; else it is built where due.

    Raises:
        NoHeaders: there is nothing to build it with; it says why.
    """
    if "shardcomm" in sys.modules:
        raise RuntimeError(
            "played_cuda: shardcomm has been imported already; install() goes before"
        )
    path = extension or build()
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
    nccl = str(BUILD / "fake_nccl_2_28" / "libnccl.so.2")
    status = module.nccl_status([nccl])
    assert status.path == nccl, status.reason or f"another NCCL was loaded: {status.path}"


def build() -> Path:
    """The extension's file, made from what the sources are now."""
    cmake = str(Path(sys.executable).parent / "cmake")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests may run side by side
        options = ["-DSHARDCOMM_TESTS=ON", "-DSHARDCOMM_PYTHON=ON"]
        python = f"-DPython_EXECUTABLE={sys.executable}"
        _run(cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), *options, python)
        if "_C_on_fakes" not in _run(cmake, "--build", str(BUILD), "--target", "help"):
            raise NoHeaders("CUDA's headers (12.8 or newer) are not on this machine")
        _run(cmake, "--build", str(BUILD), "--target", "_C_on_fakes", "-j2")
    return next(BUILD.glob("_C_on_fakes*.so"))


class Stream:
    """A stream that computes: `with stream:` has this thread compute on it, as torch.cuda.stream does."""

    def __init__(self) -> None:
        handle = ctypes.c_void_p()
        _cuda("cudaStreamCreateWithPriority", ctypes.byref(handle), 1, 0)
        self.handle = handle.value or 0
        self._before: list[int] = []

    def __enter__(self) -> Stream:
        self._before.append(_current(0))
        _threads.stream = self.handle
        return self

    def __exit__(self, *_: object) -> None:
        _threads.stream = self._before.pop()

    def synchronize(self) -> None:
        """Until what is on it has run."""
        _cuda("cudaStreamSynchronize", ctypes.c_void_p(self.handle))

    def enqueue(self, function: Callable[[], object]) -> object:
        """Has it called when its turn has come, each time if this is captured. Keep what this returns until then."""
        callback = _HostFunction(lambda _: function() and None)
        _cuda("cudaLaunchHostFunc", ctypes.c_void_p(self.handle), callback, None)
        return callback

    @property
    def captures(self) -> bool:
        """Whether what is put on it is recorded, and does not run."""
        status = ctypes.c_int()
        _cuda("cudaStreamIsCapturing", ctypes.c_void_p(self.handle), ctypes.byref(status))
        return status.value != 0


class Graph:
    """What a stream was given while it captured, to be launched as often as wanted."""

    GLOBAL, THREAD = 0, 1  # whose unsafe calls end the capture

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._executable = ctypes.c_void_p()
        self.keeps: list[object] = []

    @contextmanager
    def capture(self, mode: int = GLOBAL) -> Iterator[None]:
        """`stream`, and all that comes to wait for it, captures in here."""
        handle = ctypes.c_void_p(self._stream.handle)
        graph = ctypes.c_void_p()
        _cuda("cudaStreamBeginCapture", handle, mode)
        try:
            yield
        except BaseException:
            _library().cudaStreamEndCapture(handle, ctypes.byref(graph))
            raise
        _cuda("cudaStreamEndCapture", handle, ctypes.byref(graph))
        _cuda("cudaGraphInstantiate", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))

    def launch(self) -> None:
        """Has it run on its stream."""
        _cuda("cudaGraphLaunch", self._executable, ctypes.c_void_p(self._stream.handle))


class TorchOn(TorchDispatchMode):
    """In here torch computes on `stream`: after what is on it, or as part of the `graph` that captures it."""

    def __init__(self, stream: Stream, graph: Graph | None = None) -> None:
        super().__init__()
        self._stream = stream
        self._graph = graph
        self._keeps: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._stream.captures:
            self._stream.synchronize()
            result = func(*args, **kwargs)
            # What is freed here may still be read by what is queued, which only a GPU's allocator knows.
            self._keeps.append(result)
            return result
        assert self._graph is not None
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value was read while the stream captures, and there is none yet")
        written = _written(func, args, kwargs)
        before = [(tensor, tensor.clone()) for tensor in written]
        result = func(*args, **kwargs)  # for its shape: values come when the graph is launched
        for tensor, value in before:
            tensor.copy_(value)
        self._graph.keeps.append((args, kwargs, result))
        made = [] if written or func.is_view else list(_tensors(result))
        if "empty" not in func.name() and (written or made):

            def again() -> None:
                # A graph has addresses alone, and does not see of which class tensors have become since.
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    for to, value in zip(made, _tensors(func(*args, **kwargs)), strict=False):
                        to.copy_(value)

            self._graph.keeps.append(self._stream.enqueue(again))
        return result


class Counts(ctypes.Structure):
    """Calls of the runtime since it was loaded; see FakeCudaCounts."""

    events_created: int
    timed_events_created: int
    events_recorded: int
    event_queries: int
    allocations: int
    work: int
    _fields_ = [
        (name, ctypes.c_long)
        for name in (
            "events_created",
            "timed_events_created",
            "events_recorded",
            "event_queries",
            "allocations",
            "work",
        )
    ]


def counts() -> Counts:
    """Of now."""
    count = _library()._Z16fake_cuda_countsv
    count.restype = Counts
    return count()  # type: ignore[no-any-return]


_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that `func` writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += _tensors(given)
    return found


class _Threads(threading.local):
    stream = 0


_threads = _Threads()


def _current(index: int) -> int:
    return _threads.stream


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(BUILD / "libfake_cuda.so"))


def _cuda(function: str, *arguments: Any) -> None:
    error = getattr(_library(), function)(*arguments)
    if error != 0:
        raise RuntimeError(f"{function} returned {error}")


def _run(*command: str) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, check=False, text=True, capture_output=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"played_cuda: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout
