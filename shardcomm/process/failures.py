"""How ranks fail, and which failure was the cause of the others."""

from __future__ import annotations

import signal
import traceback
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from shardcomm._C import CommError, CudaError
from shardcomm.checkpoint.manifest import CheckpointError


class Order(IntEnum):
    """Kinds of failures, in the order in which one may be the cause of the others."""

    KILLED = 0
    OWN = 1  # an error of the rank's own
    COMM_ERROR = 2  # mostly the consequence of another rank's failure, as are errors that follow


class Failure(NamedTuple):
    """How a rank failed: `text` continues a sentence that begins with the rank's name."""

    order: Order
    text: str


def raised(error: BaseException) -> Failure:
    """The failure of a rank whose function raised `error`, which is being handled."""
    said = "raised\n" + traceback.format_exc()
    if isinstance(error, CommError | CudaError | CheckpointError):
        # The message says all; the traceback would add nothing.
        said = f"raised {type(error).__name__}: {error}"
    return Failure(Order.COMM_ERROR if _follows(error) else Order.OWN, said)


def ended(status: int | None) -> Failure:
    """The failure of a rank whose process ended, and left no result; a negative status is that of a signal."""
    if status is not None and status < 0:
        return Failure(Order.KILLED, f"was killed by {_signal_name(-status)}")
    return Failure(Order.OWN, f"ended with exit status {status} and no result")


def ended_before_the_call(status: int | None) -> Failure:
    """The failure of a rank whose process ended before it called its function."""
    failure = ended(status)
    if failure.order is Order.KILLED:
        return failure
    said = "stderr has what was raised while it imported the program and the module of fn"
    return failure._replace(text=f"ended with exit status {status} before it called fn; {said}")


def ended_with_its_server(number: int) -> Failure:
    """The failure of a rank whose fork server a signal killed, and it with the server."""
    said = f"which was killed by {_signal_name(number)}"
    return Failure(
        Order.KILLED, f"ended with the fork server, from which all ranks are forked, and {said}"
    )


def first_cause(failures: dict[int, Failure]) -> str:
    """What happened, by rank: the first cause, and a line for each of the others."""
    first = min(failures, key=lambda rank: (failures[rank].order, rank))
    others = [
        f"rank {rank} {_in_one_line(failure.text)}"
        for rank, failure in sorted(failures.items())
        if rank != first
    ]
    return "\n".join([f"rank {first} {failures[first].text}", *others])


def _follows(error: BaseException | None) -> bool:
    """Whether `error` is a CommError, or was raised because of one."""
    while error is not None and not isinstance(error, CommError):
        error = error.__cause__ or error.__context__
    return error is not None


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    above = number - signal.SIGRTMIN
    return f"SIGRTMIN+{above}" if above > 0 else f"signal {number}"


def _in_one_line(said: str) -> str:
    first, *more = said.strip().splitlines()
    return f"{first} {more[-1]}" if more and first == "raised" else first
