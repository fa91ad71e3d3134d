"""Random collectives on exactly representable numbers, and what torch's own arithmetic makes of them."""

from __future__ import annotations

import random

import torch

from shardcomm import Communicator
from shardcomm.stream.streams import Streams

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
)
OPS = ("sum", "avg", "max", "min")


def values(case: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers so small that no sum of eight of them rounds."""
    generator = torch.Generator().manual_seed(case * 64 + rank)
    low = 0 if dtype is torch.uint8 else -8
    return torch.randint(low, 9, (numel,), generator=generator).to(dtype)


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(tensors)
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    if op in ("max", "min"):
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    if stacked.dtype.is_floating_point:
        wide = torch.float64 if stacked.dtype is torch.float64 else torch.float32
        part = torch.tensor(1.0, dtype=wide) / len(tensors)
        return (stacked.to(wide).sum(0) * part).to(stacked.dtype)
    return torch.div(stacked.sum(0, dtype=stacked.dtype), len(tensors), rounding_mode="trunc")


def random_collectives(comm: Communicator, seed: int, cases: int) -> None:
    """The same calls on every rank; memory, sizes, dtypes and operations at random."""
    choose = random.Random(seed)
    window = comm.allocate(1 << 15, dtype=torch.uint8, use="gather")
    own = comm.allocate(1 << 15, dtype=torch.uint8, use="reduce")
    streams = Streams(comm.device)
    stream = streams.reduce
    for case in range(cases):
        what = choose.choice(["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
        dtype = choose.choice(DTYPES)
        op = choose.choice(OPS)
        part = choose.choice([0, 1, 3, 8, 64, choose.randrange(400)])
        queued = stream if choose.random() < 0.3 else None
        in_comm_memory = choose.random() < 0.5
        everybody = [
            values(case, r, part * comm.size, dtype).to(comm.device) for r in range(comm.size)
        ]
        mine = everybody[comm.rank]

        def memory(buffer: torch.Tensor, numel: int) -> torch.Tensor:
            if in_comm_memory and numel > 0:  # noqa: B023
                return buffer.view(dtype)[:numel]  # noqa: B023
            return torch.zeros(numel, dtype=dtype, device=comm.device)  # noqa: B023

        if what == "all_gather":
            result = memory(window, part * comm.size)
            comm.all_gather(result, mine[:part].clone(), stream=None)
            expected = torch.cat([t[:part] for t in everybody])
        elif what == "reduce_scatter":
            send = memory(own, part * comm.size)
            send.copy_(mine)
            result = torch.zeros(part, dtype=dtype, device=comm.device)
            streams.after_compute(stream)
            scale = choose.choice([1.0, 0.5, 4.0]) if dtype.is_floating_point else 1
            comm.reduce_scatter(result, send, op, scale=scale, stream=queued)
            expected = reduced(everybody, op)[comm.rank * part : (comm.rank + 1) * part] * scale
        elif what == "all_reduce":
            result = memory(own, part * comm.size)
            result.copy_(mine)
            streams.after_compute(stream)
            comm.all_reduce(result, op, stream=queued)
            expected = reduced(everybody, op)
        else:
            root = choose.randrange(comm.size)
            result = mine.clone()
            streams.after_compute(stream)
            comm.broadcast(result, root, stream=queued)
            expected = everybody[root]
        stream.record().wait()
        assert torch.equal(result, expected), (seed, case, what, dtype, op, part, in_comm_memory)
        # The next call may overwrite the shared window that a slower rank still compares.
        comm.barrier()
