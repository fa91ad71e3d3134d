"""A `python` that starts in milliseconds: a process that has loaded torch and shardcomm forks to become the program.

Tests whose hosts start many interpreters put it in the place of `sys.executable`::

    client     is where the interpreter would be, in namespaces of its own, and ends as the program does
    keeper     is a fork of the server, outside; it ends the program when the client has ended
    program    is a fork of the keeper, in the client's namespaces, with its words, environment and descriptors
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import os
import runpy
import socket
import struct
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from multiprocessing import get_context, parent_process, util
from multiprocessing.connection import wait
from pathlib import Path

from shardcomm.cluster import namespaces
from support.forking import open_streams

_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
path, *words = sys.argv
if os.path.basename(path) != "python":
    words = ["-m", os.path.basename(path), *words]
def is_passed_on(number):
    try:
        return os.get_inheritable(number)
    except OSError:
        return False
passed = [number for number in range({most}) if is_passed_on(number)]
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
said = json.dumps([words, os.getcwd(), dict(os.environ), passed])
socket.send_fds(server, [said.encode()], passed)
status = int(server.recv(16) or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""

_MOST_DESCRIPTORS = 128
_PROCESSES = 0x20000000  # CLONE_NEWPID, of setns
_OTHERS = 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000  # mounts, host name, IPC, network


@functools.cache
def executable() -> str:
    """The path of a `python`, beside which there is a `shardcomm`.

    It is that of this process where it may not enter another's namespaces.
    """
    if not namespaces._is_privileged():
        return sys.executable
    folder = Path(tempfile.mkdtemp())
    util.Finalize(None, _remove, [folder], exitpriority=0)
    address = str(folder / "socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(128)
    client = _CLIENT.format(python=sys.executable, most=_MOST_DESCRIPTORS, address=address)
    for name in ("python", "shardcomm"):
        (folder / name).write_text(client)
        (folder / name).chmod(0o755)
    python = str(folder / "python")
    get_context("forkserver").Process(target=_serve, args=(listener, python), daemon=True).start()
    listener.close()
    return python


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def _serve(listener: socket.socket, python: str) -> None:
    sys.executable = python
    starter = parent_process()
    assert starter is not None
    while starter.sentinel not in wait([listener, starter.sentinel]):
        client, _ = listener.accept()
        if os.fork() == 0:
            try:
                _keep(client)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        client.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _keep(client: socket.socket) -> None:
    said, received, _, _ = socket.recv_fds(client, 1 << 20, _MOST_DESCRIPTORS)
    pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        place = os.pidfd_open(pid)
    except ProcessLookupError:  # the client has ended
        return
    _enter(place, _PROCESSES)  # which the next process is in
    program = os.fork()
    if program == 0:
        try:
            _enter(place, _OTHERS)
            words, cwd, environment, numbers = json.loads(said)
            _renumber(received, numbers)
            open_streams()
            os.environ.clear()
            os.environ.update(environment)
            tempfile.tempdir = None  # TMPDIR may be another
            os.chdir(cwd)
            os._exit(_run(words))
        finally:
            traceback.print_exc()
            os._exit(1)
    for number in received:
        os.close(number)
    end = os.pidfd_open(program)
    if end not in wait([end, client]):
        os.kill(program, 9)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError):  # the client has ended
        client.send(b"%d" % status)


def _enter(place: int, kinds: int) -> None:
    """Takes this process into the namespaces of another, given by its descriptor."""
    if ctypes.CDLL(None, use_errno=True).setns(place, kinds):
        raise OSError(ctypes.get_errno(), "setns")


def _renumber(descriptors: list[int], numbers: list[int]) -> None:
    """Gives the descriptors these numbers, and closes all others."""
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, _MOST_DESCRIPTORS) for each in descriptors]
    os.closerange(0, _MOST_DESCRIPTORS)
    for each, number in zip(kept, numbers, strict=True):
        os.dup2(each, number)
    os.closerange(_MOST_DESCRIPTORS, os.sysconf("SC_OPEN_MAX"))


def _run(words: list[str]) -> int:
    """The exit status of the program that Python would run for these words: a module or a script, and arguments."""
    if words[0] == "-u":  # its output is flushed at its end
        del words[0]
    status = 0
    try:
        match words:
            case ["-m", module, *arguments]:
                sys.argv[:] = [module, *arguments]
                sys.path.insert(0, os.getcwd())
                if not hasattr(sys.modules.get(module), "__path__"):
                    sys.modules.pop(module, None)  # runpy would warn of it
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case [script, *_]:
                sys.argv[:] = words
                sys.path.insert(0, str(Path(script).parent))
                runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    return status
