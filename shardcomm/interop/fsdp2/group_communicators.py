"""For each of torch's process groups a communicator of shardcomm's, and its communication memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.transport_choice import SeveralHostsError, SharedMemoryError
from shardcomm.comm.words import Transport, Use
from shardcomm.interop.fsdp2.buffer_pool import BufferPool


class GroupCommunicator:
    """A communicator between the ranks of a process group, and its communication memory.

    Attributes:
        tags: The tag of each module's collectives, by the module's name.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, modules: Sequence[str]
    ) -> None:
        # Ranks that only torch reaches gain nothing from us: such a group is refused, with the reason.
        transport: Transport = "shm" if device.type == "cpu" else "nccl"
        if dist.get_backend(group) == "threaded":  # torch's own, for tests: ranks of one process
            transport = "local"
        self.comm = Communicator.from_process_group(group, device=device, transport=transport)
        self.tags = {name: self.comm.tag(f"module {name or '(root)'!r}") for name in modules}
        self._pools: dict[Use, BufferPool] = {}
        if device.type == "cpu":
            self._pools = {use: BufferPool(self.comm, use) for use in ("gather", "reduce")}

    @property
    def shares_windows(self) -> bool:
        """Whether a value that one rank writes into gather memory is there for all ranks."""
        return self.comm.transport in ("shm", "local")

    def allocate(self, numel: int, dtype: torch.dtype, use: Use) -> torch.Tensor:
        """Memory for one collective; its values are arbitrary."""
        if use in self._pools:
            return self._pools[use].take(numel, dtype)
        # Torch's allocator knows on which of FSDP2's streams memory is allocated and freed.
        return torch.empty(numel, dtype=dtype, device=self.comm.device)

    def collective(self, use: Use) -> AbstractContextManager[None]:
        """A context around each collective on memory from `allocate`."""
        return self._pools[use].collective() if use in self._pools else nullcontext()

    def close(self) -> None:
        """Leaves the group."""
        self._pools.clear()
        self.comm.close()


class GroupCommunicators:
    """One `GroupCommunicator` for each process group. All ranks of a group make it when it is first asked for."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules  # each gives them tags in this order, the same on every rank
        self._of_group: dict[dist.ProcessGroup, GroupCommunicator] = {}
        self._refused: dict[dist.ProcessGroup, str] = {}

    def get(self, group: dist.ProcessGroup, device: torch.device) -> GroupCommunicator:
        """The communicator between the ranks of `group`. Raises as `Communicator.from_process_group` does."""
        if group not in self._of_group:
            self._of_group[group] = GroupCommunicator(group, device, self._modules)
        return self._of_group[group]

    def refused(self, group: dist.ProcessGroup, device: torch.device) -> str:
        """Why there is no communicator between the ranks of `group`; "" if there is one."""
        if group not in self._refused:
            self._refused[group] = ""
            try:
                self.get(group, device)
            except SeveralHostsError:
                self._refused[group] = (
                    "its ranks are on several hosts, and from a CPU only torch's collectives reach past one"
                )
            except SharedMemoryError as error:
                self._refused[group] = str(error)
        return self._refused[group]

    def __iter__(self) -> Iterator[GroupCommunicator]:
        return iter(self._of_group.values())

    def close(self) -> None:
        """Closes all communicators."""
        for group_comm in self:
            group_comm.close()
        self._of_group.clear()
