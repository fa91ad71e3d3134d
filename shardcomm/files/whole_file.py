"""Files that are written whole or not at all, since half a report may be taken for a whole one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors that end a write which has begun: the disk, a quota or a limit is full, or the device fails.
_HALFWAY = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def written_whole(path: str | Path) -> Iterator[None]:
    """A context in which `path` is written: if an OSError ends it, the partial file is removed. The error names it."""
    try:
        yield
    except OSError as error:
        if error.errno in _HALFWAY and Path(path).is_file():  # neither a device nor a pipe
            Path(path).resolve().unlink()  # and not a link to it
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
