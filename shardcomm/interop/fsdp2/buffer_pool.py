"""Communication memory that is taken and let go of call by call, and reused only when every rank has let go of it.

A rank copies its shard into a shared window *before* the gather, when a peer may still be reading what the last gather
left there; and memory is made by all ranks together or not at all. So ranks must agree on what is free. They do without
a meeting of its own: each posts, before every collective, which of its buffers are free, and reads what the others
posted after it.

    rank 0   take A  gather(posts -)  | reads A | take B  gather(posts A)  | reads B | take A ...
    rank 1   take A  gather(posts -)    | reads A | take B  gather(posts A)  | reads B | take A ...

What all had posted as free at one collective may be taken from then on. A buffer is free when no tensor refers to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shardcomm.comm.communicator import Communicator, Use

# As many as a rank's posted word has bits, of which one is the sign.
MAX_BUFFERS = 63


class BufferPool:
    """Buffers of one use, for the collectives of one channel of `comm`, on a CPU.

    `take` and `collective` are called by all ranks in the same order, from one thread at a time. In the steady state no
    memory is made: there is one buffer more than a rank uses at a time, each as large as the largest yet taken.
    """

    def __init__(self, comm: Communicator, use: Use) -> None:
        self._comm = comm
        self._use = use
        self._buffers: dict[int, memoryview] = {}
        self._leases: dict[int, weakref.ref[memoryview]] = {}
        self._agreed: set[int] = set()  # free on every rank, and not taken since
        # Two rows in turn: who posts again has read the row before last, and so have, by then, all others.
        posted = comm.allocate(2 * comm.size, dtype=torch.int64, use="gather")
        self._posted = posted.view(2, comm.size).numpy()
        self._turn = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor whose values are arbitrary. Its memory is back in the pool once nothing refers to it.

        Where `MAX_BUFFERS` are in use it is ordinary memory, through which collectives are right, and slower.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(numel, dtype=dtype)
        fitting = [i for i in self._agreed if len(self._buffers[i]) >= nbytes]
        if fitting:
            index = min(fitting, key=lambda i: (len(self._buffers[i]), i))
            self._agreed.remove(index)
        else:
            self._drop_agreed()
            if len(self._buffers) == MAX_BUFFERS:
                return torch.empty(numel, dtype=dtype)
            index = next(i for i in range(MAX_BUFFERS) if i not in self._buffers)
            made = self._comm.allocate(nbytes, dtype=torch.uint8, use=self._use)
            self._buffers[index] = made.numpy().data
        # The tensor's storage, and so every view of it, holds on to this very object.
        lease = self._buffers[index][:nbytes]
        self._leases[index] = weakref.ref(lease)
        return torch.frombuffer(lease, dtype=dtype)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around each collective of the channel: the ranks agree on what is free."""
        posted = self._posted[self._turn]
        posted[self._comm.rank] = sum(
            1 << i for i, lease in self._leases.items() if lease() is None
        )
        yield
        free = int(np.bitwise_and.reduce(posted))
        self._agreed = {i for i in self._buffers if free >> i & 1}
        self._turn = 1 - self._turn

    def _drop_agreed(self) -> None:
        """The free ones are too small: a larger one takes their place."""
        for index in self._agreed:
            del self._buffers[index], self._leases[index]
        self._agreed.clear()
