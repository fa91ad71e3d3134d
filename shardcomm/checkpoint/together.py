"""The ranks of a checkpoint fail together: each tells the others what went wrong, and all raise the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from shardcomm.checkpoint.manifest import CheckpointError, sync
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.texts import all_gather_bytes

_MOST_SHOWN = 4  # reasons in an error


@contextmanager
def together(ranks: Communicator | dist.ProcessGroup, what: str, folder: Path) -> Iterator[None]:
    """A context that fails on every rank if it fails on one. Its end is collective.

    Args:
        ranks: The ranks.
        what: Says what was not done; the message begins with it.
        folder: The folder that the message names where an error names no file.

    Raises:
        CheckpointError: A file could not be read or written, DCP failed, or another rank failed. The message gives the
            reasons of the ranks that failed, and is the same on every rank. A rank that raised another exception
            raises that one, with the reasons of all ranks as a note.
        CommError: A rank died. A ProcessGroup raises what its backend does then.
    """
    # Imported here, since it takes a second, as long as torch itself, and few programs need it.
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    own = ranks.rank if isinstance(ranks, Communicator) else ranks.rank()
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
        failure, reason = error, f"{what}: rank {own}: {sentence(error, folder)}"
    of_ranks = _all_gather(ranks, reason.encode(errors="replace"))
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
    """A sentence that says what went wrong, and with which file in `folder`, as far as that is known."""
    # Torch's reader may call Python again while the error of a read is set.
    if isinstance(error, SystemError) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    if isinstance(error, OSError):
        return f"{error.filename or folder}: {error.strerror or error}"
    if "unexpected pos" in str(error):
        return f"{folder}: {_why_cut_short(folder)}"
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _all_gather(ranks: Communicator | dist.ProcessGroup, payload: bytes) -> list[bytes]:
    if isinstance(ranks, Communicator):
        return all_gather_bytes(ranks, payload)
    everybody: list[bytes] = [b""] * ranks.size()
    dist.all_gather_object(everybody, payload, group=ranks)
    return everybody


def _why_cut_short(folder: Path) -> str:
    """Why torch could not write a file in `folder` to its end.

    Torch only says that the file is too short. So another file is written, which meets the same obstacle.
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
