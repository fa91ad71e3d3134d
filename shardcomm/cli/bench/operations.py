"""The collectives: for each its counts, bandwidth, memory, run and expected result, as nccl-tests defines them.

Sizes are total bytes: those that a rank has after an all-gather, or before a reduce-scatter. An out-of-place all-reduce
or broadcast includes a copy of its input, since neither shardcomm nor torch.distributed has one without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from shardcomm.cli.bench.case import Case, Collectives, Variant
from shardcomm.cli.bench.options import DTYPES, BenchOptions
from shardcomm.cli.exact_values import count_wrong, values
from shardcomm.comm.words import ReduceOp, Use

ROOT = 0
_SLOT_BYTES = 16  # a rank's part of a size is rounded down to a multiple of it

Run = Callable[[Collectives, torch.Tensor, torch.Tensor, ReduceOp], object]


@dataclass(frozen=True)
class Operation:
    """A collective.

    Attributes:
        name: Its name.
        sends: What a rank sends: "whole" is all of the size, and "slot" is one rank's part of it.
        receives: What a rank receives, in the same words.
        use: The use of the communication memory in which its larger side is, or its output if both are as large.
        reduces: Whether it has a reduction.
        root: The root as printed; -1 for none.
        bus_factor: busbw over algbw, as a function of the number of ranks.
        run: Runs it, from (collectives, recv, send, reduction).
        expected: What a rank has afterwards, from (inputs of all ranks in order, rank, ranks, reduction).
    """

    name: str
    sends: str
    receives: str
    use: Use
    reduces: bool
    root: int
    bus_factor: Callable[[int], float]
    run: Run
    expected: Callable[[Iterator[torch.Tensor], int, int, ReduceOp], torch.Tensor]

    is_local = False

    def redop(self, options: BenchOptions) -> str:
        """The reduction as printed."""
        return options.redop if self.reduces else "none"

    def least_bytes(self, dtype: torch.dtype, ranks: int) -> int:
        """The smallest size of which each rank has an element."""
        return _SLOT_BYTES * ranks if self.has_slots else dtype.itemsize

    @property
    def has_slots(self) -> bool:
        """Whether each rank has a part of the size."""
        return "slot" in (self.sends, self.receives)

    def case(self, on: Collectives, options: BenchOptions, size_bytes: int) -> Case | None:
        """The case for `size_bytes`, with its buffers; None for so few that a rank has no element. Collective."""
        dtype = DTYPES[options.dtype]
        if size_bytes < self.least_bytes(dtype, on.size):
            return None
        count, slots = size_bytes // dtype.itemsize, 1
        if self.has_slots:
            count, slots = count // on.size & -(_SLOT_BYTES // dtype.itemsize), on.size

        def empty(numel: int) -> torch.Tensor:
            return torch.empty(numel, dtype=dtype, device=on.device)

        numel = count * slots
        memory = options.communication_memory
        large = on.allocate(numel, dtype=dtype, use=self.use) if memory else empty(numel)
        slot = large.view(slots, count)[on.rank % slots]
        if self.receives == "whole":
            recv, send = large, empty(count if self.sends == "slot" else numel)
        else:
            recv, send = empty(count), large
        recv_in_place = slot if self.receives == "slot" else large
        send_in_place = slot if self.sends == "slot" else large
        return Case(
            size_bytes=numel * dtype.itemsize,
            count=count,
            bus_factor=self.bus_factor(on.size),
            out_of_place=self._variant(on, recv, send, options.redop),
            in_place=self._variant(on, recv_in_place, send_in_place, options.redop),
        )

    def _variant(
        self, on: Collectives, recv: torch.Tensor, send: torch.Tensor, op: ReduceOp
    ) -> Variant:
        terms = on.size if self.reduces and op in ("sum", "avg") else 1
        divisor = on.size if self.reduces and op == "avg" else 1

        def sent_by(rank: int, seed: int) -> torch.Tensor:
            return values(send.numel(), send.dtype, rank, seed, terms=terms, divisor=divisor)

        def fill(seed: int) -> None:
            send.copy_(sent_by(on.rank, seed))

        def wrong(seed: int) -> int:
            sent = (sent_by(rank, seed) for rank in range(on.size))
            return count_wrong(recv, self.expected(sent, on.rank, on.size, op))

        return Variant(
            fill=fill,
            run=partial(self.run, on, recv, send, op),
            wrong=wrong,
        )


def _all_reduce(on: Collectives, recv: torch.Tensor, send: torch.Tensor, op: ReduceOp) -> object:
    return on.all_reduce(recv if recv is send else recv.copy_(send), op)


def _broadcast(on: Collectives, recv: torch.Tensor, send: torch.Tensor, op: ReduceOp) -> object:
    copies = on.rank == ROOT and recv is not send
    return on.broadcast(recv.copy_(send) if copies else recv, ROOT)


def _slot_of_each(sent: Iterator[torch.Tensor], rank: int, ranks: int) -> Iterator[torch.Tensor]:
    return (whole.chunk(ranks)[rank] for whole in sent)


def _reduced(sent: Iterator[torch.Tensor], ranks: int, op: ReduceOp) -> torch.Tensor:
    """`op` over whole numbers, taken in 64-bit integers."""
    first = next(sent)
    combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    total = first.long()
    for tensor in sent:
        total = combine(total, tensor.long())
    return (total // ranks if op == "avg" else total).to(first.dtype)


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="all_gather",
            sends="slot",
            receives="whole",
            use="gather",
            reduces=False,
            root=-1,
            bus_factor=lambda ranks: (ranks - 1) / ranks,
            run=lambda on, recv, send, op: on.all_gather(recv, send),
            expected=lambda sent, rank, ranks, op: torch.cat(list(sent)),
        ),
        Operation(
            name="reduce_scatter",
            sends="whole",
            receives="slot",
            use="reduce",
            reduces=True,
            root=-1,
            bus_factor=lambda ranks: (ranks - 1) / ranks,
            run=lambda on, recv, send, op: on.reduce_scatter(recv, send, op),
            expected=lambda sent, rank, ranks, op: _reduced(
                _slot_of_each(sent, rank, ranks), ranks, op
            ),
        ),
        Operation(
            name="all_reduce",
            sends="whole",
            receives="whole",
            use="reduce",
            reduces=True,
            root=-1,
            bus_factor=lambda ranks: 2 * (ranks - 1) / ranks,
            run=_all_reduce,
            expected=lambda sent, rank, ranks, op: _reduced(sent, ranks, op),
        ),
        Operation(
            name="broadcast",
            sends="whole",
            receives="whole",
            use="reduce",  # memory that the other ranks can read
            reduces=False,
            root=ROOT,
            bus_factor=lambda ranks: 1.0,
            run=_broadcast,
            expected=lambda sent, rank, ranks, op: next(sent),
        ),
    )
}
