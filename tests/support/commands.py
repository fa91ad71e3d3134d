"""Runs `shardcomm` or torchrun in a process of the fork server, which has loaded what takes seconds to load.

What is about a start as users start it, or about signals, starts `python -m shardcomm` instead.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from subprocess import CompletedProcess

from torch.distributed import run

from shardcomm.__main__ import main
from support.forking import start_servers_by_forks

DEADLINE_S = 120.0


def command(
    *args: str, cwd: Path | None = None, most_bytes: int | None = None
) -> CompletedProcess[str]:
    """`shardcomm ARGS`: its exit status, and what it has printed. No file that it writes has more than `most_bytes`."""
    return _completed(main, ("shardcomm", *args), cwd, most_bytes)


def torchrun(*args: str) -> CompletedProcess[str]:
    """`torchrun ARGS`, the same. Its ranks are started as it starts them, each by what `sys.executable` is here."""
    return _completed(run.main, ("torchrun", *args))


def _completed(
    entry: Callable[[], object],
    words: tuple[str, ...],
    cwd: Path | None = None,
    most_bytes: int | None = None,
) -> CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = get_context("forkserver").Process(
            target=_run,
            args=(
                entry,
                words,
                sys.executable,
                dict(os.environ),
                cwd or Path.cwd(),
                most_bytes,
                out,
                err,
            ),
        )
        process.start()
        process.join(DEADLINE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        return CompletedProcess(words, process.exitcode or 0, out.read_text(), err.read_text())


def _run(
    entry: Callable[[], object],
    words: tuple[str, ...],
    executable: str,
    environment: dict[str, str],
    cwd: Path,
    most_bytes: int | None,
    out: Path,
    err: Path,
) -> None:
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    start_servers_by_forks()
    sys.argv, sys.executable = list(words), executable
    if most_bytes is not None:
        sys.dont_write_bytecode = True  # Python would leave half of a compiled module
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    sys.exit(entry())
