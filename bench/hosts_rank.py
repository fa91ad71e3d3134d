"""What a rank of bench/hosts.py measures; rank 0 writes it to the file that the command line names.

shardcomm and Gloo take turns in each round. A time is the slowest rank's from a common start, of a call in a row of
calls. Bytes are what each host's link has brought in, for a call.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from compare_fsdp2 import BATCH, CONTEXT, full_gradients, loss_of, model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

import shardcomm
from shardcomm.cluster import link_bytes
from shardcomm.comm.words import Transport
from shardcomm.models.gpt import VOCAB

TRANSPORT: Transport = "hosts"
RANKS_A_HOST = 2
SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of all ranks' parts
OPS = ("all_gather", "reduce_scatter", "all_reduce")
STEP = "GPT step"
OURS, GLOO = "shardcomm", "Gloo"
STEP_ROUNDS = 3

Run = Callable[[], object]


@dataclass
class Measured:
    """Of each round: seconds, and for each host the bytes that came in."""

    seconds: list[float] = field(default_factory=list)
    received: list[list[float]] = field(default_factory=list)


def rounds_for(size: int) -> tuple[int, int]:
    """Rounds, and calls in a row in each."""
    if size <= 64 << 10:
        return 10, 5
    if size <= 1 << 20:
        return 10, 2
    return (5, 1) if size <= 16 << 20 else (3, 1)


def measure(run: Run, calls: int, into: Measured) -> None:
    dist.barrier()
    before = link_bytes().received
    dist.barrier()  # every rank has looked
    start = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - start
    dist.barrier()
    own = torch.tensor([seconds, link_bytes().received - before], dtype=torch.float64) / calls
    gathered = torch.empty(2 * dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_into_tensor(gathered, own)
    every = gathered.view(-1, 2)
    into.seconds.append(float(every[:, 0].max()))
    into.received.append(every[::RANKS_A_HOST, 1].tolist())


def part_of(size: int, ranks: int) -> int:
    """The elements that are one rank's."""
    return size // 4 // ranks


def inputs(numel: int, ranks: int) -> Iterator[torch.Tensor]:
    """What each rank has. Whole numbers, whose sums are exact in any order."""
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(rank)
        yield torch.randint(-99, 99, (numel,), generator=generator, dtype=torch.int32).float()


def collectives(comm: shardcomm.Communicator, size: int) -> dict[str, dict[str, Run]]:
    """What takes turns, by operation and peer; each has run once, and its result was checked."""
    rank, ranks = comm.rank, comm.size
    part = part_of(size, ranks)
    mine = slice(rank * part, (rank + 1) * part)
    own, total, gathered = torch.empty(0), torch.zeros(ranks * part), torch.empty(ranks * part)
    for i, values in enumerate(inputs(ranks * part, ranks)):
        total += values
        gathered[i * part : (i + 1) * part] = values[:part]
        own = values if i == rank else own
    shard = own[:part].clone()

    window, sent, summed = (
        comm.allocate(ranks * part, use=use) for use in ("gather", "reduce", "reduce")
    )
    whole, reduced = torch.empty(ranks * part), torch.empty(part)
    sent.copy_(own)
    runs: dict[str, dict[str, tuple[Run, torch.Tensor]]] = {
        "all_gather": {
            OURS: (lambda: comm.all_gather(window, shard), window),
            GLOO: (lambda: dist.all_gather_into_tensor(whole, shard), whole),
        },
        "reduce_scatter": {
            OURS: (lambda: comm.reduce_scatter(reduced, sent), reduced),
            GLOO: (lambda: dist.reduce_scatter_tensor(reduced, own), reduced),
        },
        "all_reduce": {
            OURS: (lambda: comm.all_reduce(summed), summed),
            GLOO: (lambda: dist.all_reduce(whole), whole),
        },
    }
    expected = {"all_gather": gathered, "reduce_scatter": total[mine], "all_reduce": total}
    for op, peers in runs.items():
        for peer, (run, result) in peers.items():
            result.copy_(own if op == "all_reduce" else torch.full_like(result, torch.nan))
            comm.barrier()
            run()
            assert torch.equal(result, expected[op]), (op, peer, size)
            if op == "all_reduce":
                result.zero_()  # sums of sums grow
    return {op: {peer: run for peer, (run, _) in peers.items()} for op, peers in runs.items()}


class Steps:
    """The same GPT under shardcomm's engine and under FSDP2 on Gloo; each step's loss is kept."""

    def __init__(self, comm: shardcomm.Communicator) -> None:
        generator = torch.Generator().manual_seed(comm.rank)
        self._tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=generator)
        self._losses: dict[str, float] = {}
        ours = model()
        self._engine = shardcomm.fully_shard(ours, comm, units=list(ours.blocks))
        mesh = init_device_mesh("cpu", (comm.size,))
        self._fsdp2 = model()
        for block in self._fsdp2.blocks:
            fsdp2_fully_shard(block, mesh=mesh)
        fsdp2_fully_shard(self._fsdp2, mesh=mesh)
        self.runs: dict[str, Run] = {
            OURS: lambda: self._step(OURS, ours),
            GLOO: lambda: self._step(GLOO, self._fsdp2),
        }

    def _step(self, name: str, net: torch.nn.Module) -> None:
        """Forward and backward."""
        net.zero_grad(set_to_none=True)
        loss = loss_of(net, self._tokens)
        loss.backward()
        self._losses[name] = float(loss.detach())

    def check(self) -> None:
        """Both have come to the same loss and the same gradients."""
        assert len(set(self._losses.values())) == 1, self._losses
        expected = {name: param.grad for name, param in self._fsdp2.named_parameters()}
        for name, grad in full_gradients(self._engine).items():
            sharded = expected[name]
            assert isinstance(sharded, DTensor)
            full = sharded.full_tensor()
            torch.testing.assert_close(grad, full, rtol=1e-5, atol=1e-8, msg=name)

    def close(self) -> None:
        self._engine.close()


def main(file: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    torch.set_num_threads(1)
    comm = shardcomm.Communicator.from_env(transport=TRANSPORT, device="cpu")
    dist.init_process_group("gloo")
    taken: dict[str, Measured] = {}
    for size in SIZES:
        rounds, calls = rounds_for(size)
        contenders = collectives(comm, size)
        for _ in range(rounds):
            for op, peers in contenders.items():
                for peer, run in peers.items():
                    measure(run, calls, taken.setdefault(f"{op}/{size}/{peer}", Measured()))

    steps = Steps(comm)
    for round_ in range(STEP_ROUNDS + 1):
        for peer, run in steps.runs.items():
            # The first warms up.
            into = taken.setdefault(f"{STEP}/0/{peer}", Measured()) if round_ else Measured()
            measure(run, 1, into)
    steps.check()
    steps.close()
    if comm.rank == 0:
        Path(file).write_text(json.dumps({name: asdict(each) for name, each in taken.items()}))
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
