"""CommErrors that are raised in Python, with the fields that the compiled core's have.

A program reads the fields, where people read the text::

    try:
        comm.all_gather(recv, send)
    except CommError as error:
        if error.kind == "died":
            restart_without(error.rank)
"""

from __future__ import annotations

import json
from typing import Literal

from shardcomm._C import CommError

Kind = Literal["died", "late", "mismatch", "closed", "aborted", "backend"]


def comm_error(
    kind: Kind,
    text: str,
    *,
    rank: int | None = None,
    operation: str | None = None,
    sequence: int | None = None,
    reporter: int | None = None,
) -> CommError:
    """A CommError with these fields; `_C.pyi` says what each of them means."""
    error = CommError(text)
    error.kind = kind
    error.rank = rank
    error.operation = operation
    error.sequence = sequence
    error.reporter = reporter
    return error


def like(error: CommError, text: str) -> CommError:
    """A new error with the fields of `error`. To raise `error` itself again would keep alive what its frames hold."""
    return comm_error(
        error.kind,
        text,
        rank=error.rank,
        operation=error.operation,
        sequence=error.sequence,
        reporter=error.reporter,
    )


def to_bytes(error: CommError) -> bytes:
    """`error` as bytes, from which other ranks can raise the same error."""
    return json.dumps([error.kind, str(error), error.rank, error.reporter]).encode()


def from_bytes(word: bytes) -> CommError:
    """The error that another rank has sent; see `to_bytes`."""
    kind, text, rank, reporter = json.loads(word)
    return comm_error(kind, text, rank=rank, reporter=reporter)
