"""Communication memory that is taken and given back call by call, and reused only when every rank has given it back.

A rank copies its shard into a shared window *before* the gather, when a peer may still be reading what the last gather
left there. And only all ranks together can allocate such memory. So the ranks must agree on which buffers are free.
That takes no meeting of its own: before every collective each rank posts which of its buffers are free, and after it
each rank reads what the others posted.

    rank 0   take A  gather(posts -)  | reads A | take B  gather(posts A)  | reads B | take A ...
    rank 1   take A  gather(posts -)    | reads A | take B  gather(posts A)  | reads B | take A ...

A buffer that all ranks posted as free at one collective may be taken from then on. On a rank a buffer is free when no
tensor refers to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.words import Use

# A rank posts a word of 64 bits, of which one is the sign.
MAX_BUFFERS = 63


class BufferPool:
    """Buffers of one use, for the collectives of one channel of `comm`, on a CPU.

    All ranks call `take` and `collective` in the same order, from one thread at a time. In the steady state nothing is
    allocated: there is one buffer more than a rank uses at a time, each as large as the largest one taken so far.
    """

    def __init__(self, comm: Communicator, use: Use) -> None:
        self._comm = comm
        self._use = use
        self._buffers: dict[int, memoryview] = {}
        self._leases: dict[int, weakref.ref[memoryview]] = {}
        self._agreed: set[int] = set()  # free on every rank, and not taken since
        # Two rows, used in turn. When a rank posts again, it has read the row before last, and so have all others.
        posted = comm.allocate(2 * comm.size, dtype=torch.int64, use="gather")
        self._posted = posted.view(2, comm.size).numpy()
        self._turn = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor whose values are arbitrary. Its memory returns to the pool when nothing refers to it.

        If `MAX_BUFFERS` are in use, it is ordinary memory, with which collectives are right, but slower.
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
        # The tensor's storage, and so every view of it, keeps this very object alive.
        lease = self._buffers[index][:nbytes]
        self._leases[index] = weakref.ref(lease)
        return torch.frombuffer(lease, dtype=dtype)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A context around each collective of the channel, by which the ranks agree on which buffers are free."""
        posted = self._posted[self._turn]
        posted[self._comm.rank] = sum(
            1 << i for i, lease in self._leases.items() if lease() is None
        )
        yield
        free = int(np.bitwise_and.reduce(posted))
        self._agreed = {i for i in self._buffers if free >> i & 1}
        self._turn = 1 - self._turn

    def _drop_agreed(self) -> None:
        """Drops the buffers that are free, since they are too small; a larger one takes their place."""
        for index in self._agreed:
            del self._buffers[index], self._leases[index]
        self._agreed.clear()
