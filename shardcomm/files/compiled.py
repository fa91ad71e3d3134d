"""Shared libraries against the headers of another package: compiled when they are first used, and kept in a cache.

A library that was compiled when shardcomm was built would fit one version of that package alone.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from shardcomm.files.installed import get_include, get_library_dir

_LONGEST_S = (
    3600  # no compiler takes as long; a folder older than this is of a process that was killed
)


def compiled(
    what: str, name: str, source: Path, options: Sequence[str], libraries: Sequence[str] = ()
) -> Path:
    """The compiled `source`, from the cache if it is there; it links the C library.

    Args:
        what: What errors call it, "shardcomm.jax" for instance.
        name: What it is compiled against, as a part of the file's name: "jax-0.10.2".
        source: A C++ file, next to which are those that it includes.
        options: What the compiler is told: the language's standard, and the folders of headers.
        libraries: What is linked beside the C library, as the linker is told.

    Raises:
        RuntimeError: There is no C++ compiler, or it refuses, or the cache cannot be written.
    """
    headers = [Path(get_include()) / header for header in ("shardcomm.h", "shardcomm.hpp")]
    digest = blake2b(shlex.join([*options, *libraries]).encode(), digest_size=8)
    for file in sorted([*source.parent.iterdir(), *headers]):
        digest.update(file.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardcomm"
    result = base / f"{name}-{digest.hexdigest()}.so"
    if result.exists():
        return result
    try:
        base.mkdir(parents=True, exist_ok=True)
        with (base / "lock").open("w") as lock:  # one rank of the host compiles, the others wait
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                _compile(what, source, options, libraries, result)
    except OSError as error:
        raise RuntimeError(
            f"{what} is compiled when it is first used, and {base} cannot keep it ({error}); name another folder in "
            "XDG_CACHE_HOME"
        ) from error
    return result


def _compile(
    what: str, source: Path, options: Sequence[str], libraries: Sequence[str], result: Path
) -> None:
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(
            f"{what} is compiled when it is first used, and there is no {compiler[0]}; install a C++ compiler "
            "(Debian: apt install g++), or name one in CXX"
        )
    _remove_leftovers(result.parent)
    # A folder of this process: on a network file system the lock may not hold between hosts.
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=result.parent) as folder:
        unfinished = Path(folder) / result.name
        command = [
            *compiler,
            *("-O2", "-fPIC", "-shared", "-w", *options),
            *("-I", get_include(), str(source), "-o", str(unfinished)),
            *("-L", get_library_dir(), "-l:libshardcomm.so.0", *libraries),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(
                f"{what} could not be compiled: {shlex.join(command)} ended with {done.returncode}:\n"
                f"{done.stderr.strip()}"
            )
        unfinished.replace(result)


def _remove_leftovers(cache: Path) -> None:
    for folder in cache.glob("unfinished-*"):
        with suppress(FileNotFoundError):  # another host removes it, too
            if time.time() - folder.stat().st_mtime > _LONGEST_S:
                shutil.rmtree(folder)
