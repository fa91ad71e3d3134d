"""Memory that tensors have of the core: whatever thread drops the last of them, it needs no lock of Python's."""

from __future__ import annotations

from support import interpreters

# A thread that knows nothing of Python calls DLPack's deleter, while the thread that waits for it holds Python's lock.
# If the deleter wanted the lock, both would wait.
DROPPED_BY_ANOTHER_THREAD = """
import ctypes
import shardcomm
from shardcomm import _C

comm = shardcomm.Communicator.local_group(1)[0]
capsule = comm._core.allocate(64, _C.Use.gather).as_dlpack()
python = ctypes.pythonapi  # calls of a PyDLL keep the lock
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = ctypes.py_object, ctypes.c_char_p
managed = python.PyCapsule_GetPointer(capsule, b"dltensor")
used = ctypes.c_char_p(b"used_dltensor")
python.PyCapsule_SetName(ctypes.py_object(capsule), used)
# DLManagedTensor: a DLTensor of 48 bytes, the context, the deleter.
deleter = ctypes.c_void_p.from_address(managed + 56)
thread = ctypes.c_ulong()
system = ctypes.PyDLL(None)
assert system.pthread_create(ctypes.byref(thread), None, deleter, ctypes.c_void_p(managed)) == 0
assert system.pthread_join(thread, None) == 0
"""


def test_a_thread_without_pythons_lock_drops_it() -> None:
    ended = interpreters.run(DROPPED_BY_ANOTHER_THREAD)
    assert ended.returncode == 0, ended.stderr
