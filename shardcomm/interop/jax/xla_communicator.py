"""A group of ranks for programs that XLA compiles: a communicator of the C library."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn, Self

import jax

from shardcomm._C import CommError
from shardcomm.arguments.checks import check_seconds, check_type
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.words import DEADLINE_S
from shardcomm.interop.c_library import NCCL, SHM, loaded_everywhere
from shardcomm.interop.jax.library import library
from shardcomm.interop.jax.order import finish
from shardcomm.meeting.comm_error import comm_error

_TRANSPORTS = {"shm": SHM, "nccl": NCCL}
_PLATFORMS = {"shm": "cpu", "nccl": "cuda"}


class XlaCommunicator:
    """A group of ranks, for the collectives of `shardcomm.jax`. Collective.

    It connects the ranks of `comm` a second time, in the C library that XLA calls, and does not use `comm` again. As a
    context manager it closes itself at the end. If a collective in the block has failed, the block ends with a
    [`CommError`][shardcomm.CommError]; inside the block JAX raises its own `JaxRuntimeError` with the same sentence.

    Attributes:
        rank: This rank's number, 0 to `size` - 1.
        size: How many ranks the group has.

    Example:
        ```python
        import jax, jax.numpy as jnp, shardcomm.jax

        with shardcomm.Communicator.from_env() as ranks, shardcomm.jax.XlaCommunicator(ranks) as comm:
            total = jax.jit(lambda x: shardcomm.jax.all_reduce(x, comm))(jnp.ones(3))
            assert total.tolist() == [comm.size] * 3
        ```
    """

    def __init__(self, comm: Communicator, *, deadline_s: float = DEADLINE_S) -> None:
        """Connects this rank with the others.

        Args:
            comm: The ranks, each a process: a communicator over `shm` (for JAX on CPUs) or `nccl` (for JAX on the GPU
                `comm.device`), or of one rank.
            deadline_s: How long a rank waits for another one in a collective, in seconds; the same on all ranks.

        Raises:
            TypeError: `comm` is no `shardcomm.Communicator`.
            ValueError: `comm` is over another transport, or `deadline_s` is no positive number.
            RuntimeError: On some rank the library cannot be loaded or compiled; the error says on which, and why.
            CommError: A rank did not come.
        """
        check_type("shardcomm.jax.XlaCommunicator", "comm", comm, Communicator, "a Communicator")
        check_seconds("shardcomm.jax.XlaCommunicator", "deadline_s", deadline_s)
        self._transport = comm.transport
        if comm.size == 1:  # over 'local', which the C library does not connect
            self._transport = "nccl" if comm.device.type == "cuda" else "shm"
        if self._transport not in _TRANSPORTS:
            raise ValueError(
                f"shardcomm.jax.XlaCommunicator: comm is over {comm.transport!r}; accepted: 'shm' (processes of one "
                "host, JAX on CPUs), 'nccl' (JAX on GPUs)"
            )
        self.rank = comm.rank
        self.size = comm.size
        device = comm.device.index or 0
        self._library = loaded_everywhere(comm, "shardcomm.jax.XlaCommunicator", library)
        transport = _TRANSPORTS[self._transport]
        handle = self._library.connect(comm, transport, device, deadline_s, range(comm.size))
        self.number = self._library.add(handle, comm.size, device)

    def check(self) -> None:
        """Tells whether the group works.

        Raises:
            CommError: A collective has failed, or the communicator was closed.
        """
        if not self._library.check(self.number):
            text = f"rank {self.rank} has closed this communicator; it cannot be used any more"
            raise comm_error("closed", text, rank=self.rank, reporter=self.rank)

    def check_platform(self, operation: str, platform: str) -> None:
        """Checks that programs for `platform` can call these collectives.

        Raises:
            ValueError: They compute elsewhere than the group communicates.
        """
        needed = _PLATFORMS[self._transport]
        if platform != needed:
            raise ValueError(
                f"{operation}: this program is compiled for {platform!r}, and the communicator is over "
                f"{self._transport!r}, for {needed!r}; make it of ranks with device={platform!r}, as by "
                f"Communicator.from_env(device={platform!r}), or let JAX compute elsewhere, by jax.default_device or "
                "jax.config.update('jax_platforms', ...)"
            )

    def close(self) -> None:
        """Waits for the programs that this thread has started, leaves the group, and gives back what it holds.

        Ranks that wait for this one afterwards fail, as do programs that were compiled for this communicator.
        """
        finish()
        self._library.close(self.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, jax.errors.JaxRuntimeError) or (error is None and not finish()):
                self.check()
        except CommError as failure:
            raise failure from error
        finally:
            self._library.close(self.number)  # at once, since other ranks may wait for this one
            finish()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a shardcomm.jax.XlaCommunicator cannot be copied or pickled: it is this process's place in a group; "
            "another process makes its own"
        )

    def __repr__(self) -> str:
        return f"shardcomm.jax.XlaCommunicator({self._transport}, rank {self.rank} of {self.size})"
