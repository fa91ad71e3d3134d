"""The ranks of a checkpoint fail together: each tells the others what went wrong, and all raise the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardcomm.checkpoint.manifest import CheckpointError, sync
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.texts import all_gather_bytes

_MOST_SHOWN = 4  # reasons in an error


@contextmanager
def together(comm: Communicator, what: str, folder: Path) -> Iterator[None]:
    """What is done inside fails on every rank if it fails on one. Collective at its end.

    Args:
        what: says what was not done; the message begins with it.
        folder: is named where an error names no file.

    Raises:
        CheckpointError: a file could not be read or written, DCP failed, or another rank failed. It gives the reasons
            of the ranks that failed, and is the same on every rank. Only a rank that raised something else raises that,
            with the reasons of all as a note.
        CommError: a rank died.
    """
    # Not at every start: it takes a second, as long as torch itself.
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    failure: BaseException | None = None
    reason = ""
    try:
        yield
    except CheckpointException as error:  # DCP's, and the same on every rank
        failure = error
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = f"{what}: rank {rank}: {sentence(cause, folder)}"
    except CheckpointError as error:
        failure, reason = error, str(error)
    except Exception as error:
        failure, reason = error, f"{what}: rank {comm.rank}: {sentence(error, folder)}"
    of_ranks = all_gather_bytes(comm, reason.encode(errors="replace"))
    reasons = list(dict.fromkeys(each.decode() for each in of_ranks if each))
    if not reasons:
        return
    first, *more = reasons
    shown = [first, *(each.removeprefix(f"{what}: ") for each in more[: _MOST_SHOWN - 1])]
    left_out = len(reasons) - len(shown)
    message = "; ".join(shown) + f"; and {left_out} ranks more" * (left_out > 0)
    if failure is None or isinstance(failure, (OSError, CheckpointError, CheckpointException)):
        raise CheckpointError(message) from failure
    if more:
        failure.add_note(message)
    raise failure


def sentence(error: BaseException, folder: Path) -> str:
    """What went wrong, and with which file in `folder`, as far as it is known."""
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {error.strerror or error}"
    if "unexpected pos" in str(error):
        return f"{folder}: {_why_cut_short(folder)}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _why_cut_short(folder: Path) -> str:
    """Why a file in `folder` is shorter than torch meant it to be, which is all that torch says.

    What is in the way of that file is in the way of another.
    """
    another = folder / f"another-{os.getpid()}"
    try:
        another.write_bytes(bytes(1 << 20))
        sync(another)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with suppress(OSError):
            another.unlink(missing_ok=True)
    return "torch could not write a file there to its end"
