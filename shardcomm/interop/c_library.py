"""The C library in this process, for what is compiled against it: a group of ranks there, and its errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.texts import all_gather_bytes, all_gather_text
from shardcomm.files.installed import get_library_dir
from shardcomm.meeting.comm_error import Kind, comm_error

SHM, NCCL = 0, 3  # of shc_transport

_OK, _INVALID_ARGUMENT, _COMM_ERROR = 0, 2, 3  # of shc_status
_VERSION = 100  # SHC_VERSION: the header that the structs below are written after

Loaded = TypeVar("Loaded")


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
        ("exact_sums", ctypes.c_int64),
    )


class _UniqueId(ctypes.Structure):  # shc_unique_id
    _fields_ = (("bytes", ctypes.c_char * 512),)


class CLibrary:
    """The functions of the C library that Python calls; a status that is no success becomes an exception."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(str(Path(get_library_dir()) / "libshardcomm.so.0"))

    def connect(
        self,
        comm: Communicator,
        transport: int,
        device: int,
        deadline_s: float,
        ranks: Sequence[int],
    ) -> ctypes.c_void_p:
        """This rank's handle of a group of `ranks`, which are this one and others of `comm`; collective in `comm`.

        The group sums as `comm` does.
        """
        name = _UniqueId()
        if comm.rank == ranks[0]:
            self.raise_unless_ok(
                self._c.shc_get_unique_id(transport, len(ranks), ctypes.byref(name))
            )
        name = _UniqueId.from_buffer_copy(all_gather_bytes(comm, bytes(name))[ranks[0]])
        handle = ctypes.c_void_p()
        exact = comm.sums == "exact"
        options = _CommOptions(ctypes.sizeof(_CommOptions), _VERSION, device, deadline_s, exact)
        self.raise_unless_ok(
            self._c.shc_comm_init_rank(
                ctypes.byref(handle),
                len(ranks),
                ctypes.byref(name),
                ranks.index(comm.rank),
                ctypes.byref(options),
            )
        )
        return handle

    def raise_unless_ok(self, status: int) -> None:
        """Raises the error of the thread's last call, if its `status` says that there is one."""
        if status == _OK:
            return
        last = _LastError(ctypes.sizeof(_LastError), _VERSION)
        self._c.shc_last_error(ctypes.byref(last))
        raise error_of(
            status,
            last.text.decode(),
            last.kind.decode(),
            last.rank,
            last.operation.decode(),
            last.sequence,
            last.reporter,
        )


def error_of(
    status: int, text: str, kind: Kind, rank: int, operation: str, sequence: int, reporter: int
) -> Exception:
    """What Python raises for an error of the C library, of which these are the fields."""
    function, _, sentence = text.partition(": ")
    if status == _COMM_ERROR:
        return comm_error(
            kind,
            sentence,
            rank=None if rank < 0 else rank,
            operation=operation or None,
            sequence=sequence or None,
            reporter=None if reporter < 0 else reporter,
        )
    text = f"{function.removeprefix('shc_')}: {sentence}"
    return (ValueError if status == _INVALID_ARGUMENT else RuntimeError)(text)


def loaded_everywhere(comm: Communicator, what: str, load: Callable[[], Loaded]) -> Loaded:
    """What `load` returns; collective, so that no rank waits for one that cannot load.

    Raises:
        RuntimeError: `load` raised an Exception on some rank; it says on which, and why.
    """
    trouble = ""
    try:
        loaded = load()
    except (OSError, ImportError, RuntimeError) as error:
        trouble = str(error)
    except Exception as error:
        trouble = repr(error)
    for rank, text in enumerate(all_gather_text([comm], trouble)):
        if text:
            raise RuntimeError(f"{what}: rank {rank}: {text}")
    return loaded
