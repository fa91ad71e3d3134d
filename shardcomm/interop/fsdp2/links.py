"""Between the ranks of a process group: a communicator of ours, and its communication memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from shardcomm.comm.communicator import Communicator, Transport, Use
from shardcomm.comm.rendezvous import SeveralHostsError, SharedMemoryError
from shardcomm.interop.fsdp2.buffer_pool import BufferPool


class Link:
    """A process group's ranks, and communication memory between them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # Ranks that only torch reaches gain nothing from us: such a group is refused, with the reason.
        transport: Transport = "shm" if device.type == "cpu" else "nccl"
        if dist.get_backend(group) == "threaded":  # torch's own, for tests: ranks of one process
            transport = "local"
        self.comm = Communicator.from_process_group(group, device=device, transport=transport)
        self._pools: dict[Use, BufferPool] = {}
        if device.type == "cpu":
            self._pools = {use: BufferPool(self.comm, use) for use in ("gather", "reduce")}

    @property
    def shares_windows(self) -> bool:
        """Whether what one rank writes into gather memory is there for all."""
        return self.comm.transport in ("shm", "local")

    def allocate(self, numel: int, dtype: torch.dtype, use: Use) -> torch.Tensor:
        """Memory for one collective; its values are arbitrary."""
        if use in self._pools:
            return self._pools[use].take(numel, dtype)
        # Torch's allocator knows on which of FSDP2's streams memory is made and let go of.
        return torch.empty(numel, dtype=dtype, device=self.comm.device)

    def collective(self, use: Use) -> AbstractContextManager[None]:
        """Around each collective on memory from `allocate`."""
        return self._pools[use].collective() if use in self._pools else nullcontext()

    def close(self) -> None:
        """Leaves the group."""
        self._pools.clear()
        self.comm.close()


class Links:
    """One link for each process group; made when first asked for, by all its ranks."""

    def __init__(self) -> None:
        self._of_group: dict[dist.ProcessGroup, Link] = {}
        self._refused: dict[dist.ProcessGroup, str] = {}

    def get(self, group: dist.ProcessGroup, device: torch.device) -> Link:
        """The link between the ranks of `group`. Raises as `Communicator.from_process_group` does."""
        if group not in self._of_group:
            self._of_group[group] = Link(group, device)
        return self._of_group[group]

    def refused(self, group: dist.ProcessGroup, device: torch.device) -> str:
        """Why there is no link between the ranks of `group`; "" if there is one."""
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

    def __iter__(self) -> Iterator[Link]:
        return iter(self._of_group.values())

    def close(self) -> None:
        """Closes all links."""
        for link in self:
            link.close()
        self._of_group.clear()
