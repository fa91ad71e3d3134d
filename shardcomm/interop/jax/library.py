"""The C library in this process, and the handlers by which XLA calls it.

The handlers are one C++ file, `lib/jax/handlers.cpp` of this package. They are compiled the first time that a machine
needs them, against the headers that jaxlib brings, and kept in a cache: XLA supports handlers that were compiled
against its headers of the last twelve months, so that a library made when shardcomm was built would stop working.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shlex
import shutil
import subprocess
from functools import cache
from hashlib import blake2b
from pathlib import Path

import jax
import jaxlib

from shardcomm.files.installed import get_include, get_library_dir
from shardcomm.meeting.comm_error import comm_error

_OK, _INVALID_ARGUMENT, _COMM_ERROR = 0, 2, 3  # of shc_status
_VERSION = 100  # SHC_VERSION: the header that the structs below are written after

TARGET = "shardcomm_collective"
"""The name by which programs call the handlers."""


class _LastError(ctypes.Structure):  # shc_error
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("version", ctypes.c_int),
        ("status", ctypes.c_int),
        ("text", ctypes.c_char_p),
        ("kind", ctypes.c_char_p),
        ("rank", ctypes.c_int),
        ("reporter", ctypes.c_int),
        ("operation", ctypes.c_char_p),
        ("sequence", ctypes.c_uint64),
    )


class _CommOptions(ctypes.Structure):  # shc_comm_options
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("version", ctypes.c_int),
        ("device", ctypes.c_int),
        ("deadline_s", ctypes.c_double),
    )


class _UniqueId(ctypes.Structure):  # shc_unique_id
    _fields_ = (("bytes", ctypes.c_char * 512),)


class Library:
    """What `Communicator` calls of the C interface; a status that is no success becomes an exception."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(str(Path(get_library_dir()) / "libshardcomm.so.0"))
        self._handlers = ctypes.CDLL(str(_compiled()))
        self._handlers.shardcomm_jax_add.restype = ctypes.c_int64
        for platform in ("cpu", "cuda"):
            handler = getattr(self._handlers, f"shardcomm_jax_on_{platform}")
            name = platform.upper() if platform == "cuda" else platform
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform=name)

    def unique_id(self, transport: int, size: int) -> bytes:
        """The bytes that name a new group."""
        name = _UniqueId()
        self._check(self._c.shc_get_unique_id(transport, size, ctypes.byref(name)))
        return bytes(name)

    def connect(
        self, unique_id: bytes, rank: int, size: int, device: int, deadline_s: float
    ) -> ctypes.c_void_p:
        """This rank's handle of the group; collective."""
        comm = ctypes.c_void_p()
        options = _CommOptions(ctypes.sizeof(_CommOptions), _VERSION, device, deadline_s)
        name = _UniqueId.from_buffer_copy(unique_id)
        self._check(
            self._c.shc_comm_init_rank(
                ctypes.byref(comm), size, ctypes.byref(name), rank, ctypes.byref(options)
            )
        )
        return comm

    def add(self, comm: ctypes.c_void_p, size: int, device: int) -> int:
        """The number by which programs name the communicator."""
        number = int(self._handlers.shardcomm_jax_add(comm, size, device))
        if number < 0:
            raise RuntimeError(
                "this process has made 65536 communicators for JAX, which is the most"
            )
        return number

    def check(self, comm: ctypes.c_void_p) -> None:
        """Raises CommError if the group has failed or was closed."""
        self._check(self._c.shc_comm_check(comm))

    def close(self, comm: ctypes.c_void_p) -> None:
        """Leaves the group."""
        self._check(self._c.shc_comm_close(comm))

    def _check(self, status: int) -> None:
        if status == _OK:
            return
        last = _LastError(ctypes.sizeof(_LastError), _VERSION)
        self._c.shc_last_error(ctypes.byref(last))
        text = last.text.decode().removeprefix("shc_comm_check: ")
        if status == _COMM_ERROR:
            raise comm_error(
                last.kind.decode(),
                text,
                rank=None if last.rank < 0 else last.rank,
                operation=last.operation.decode() or None,
                sequence=last.sequence or None,
                reporter=None if last.reporter < 0 else last.reporter,
            )
        raise (ValueError if status == _INVALID_ARGUMENT else RuntimeError)(text)


@cache
def library() -> Library:
    """The library; the first call of a process loads it, and the first of a machine compiles the handlers.

    Raises:
        RuntimeError: There is no C++ compiler, or it refuses; the error has its words.
    """
    return Library()


def _compiled() -> Path:
    """The compiled handlers, from the cache if they are there."""
    source = Path(get_library_dir()) / "jax" / "handlers.cpp"
    header = Path(get_include()) / "shardcomm.h"
    key = blake2b(source.read_bytes() + header.read_bytes(), digest_size=8).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardcomm"
    base.mkdir(parents=True, exist_ok=True)
    result = base / f"jax-{jaxlib.__version__}-{key}.so"
    with (base / "lock").open("w") as lock:  # one rank of the host compiles, and the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            _compile(source, result)
    return result


def _compile(source: Path, result: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(
            f"shardcomm.jax compiles its handlers when they are first used, and there is no {compiler[0]}; install a "
            "C++17 compiler (Debian: apt install g++), or name one in CXX"
        )
    unfinished = result.with_suffix(".unfinished")
    folders = ["-I", get_include(), "-isystem", jax.ffi.include_dir(), "-L", get_library_dir()]
    options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-w"]
    command = [*compiler, *options, *folders, str(source), "-o", str(unfinished)]
    done = subprocess.run(
        [*command, "-l:libshardcomm.so.0"], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"shardcomm.jax could not compile its handlers: {shlex.join(command)} ended with {done.returncode}:\n"
            f"{done.stderr.strip()}"
        )
    unfinished.replace(result)
