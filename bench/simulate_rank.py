"""What a rank of bench/simulate.py measures: steps of a GPT under each strategy, which take turns."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardcomm
from shardcomm.cli.bench.network import Costs, measured_costs
from shardcomm.models.gpt import GPT, VOCAB
from shardcomm.schedule.strategy import STRATEGIES

CONTEXT, WARM_UP = 128, 1


class Model(NamedTuple):
    width: int
    layers: int
    sequences: int

    def __str__(self) -> str:
        return f"width {self.width}, {self.layers} blocks, {self.sequences} x {CONTEXT} tokens"

    def made(self) -> GPT:
        return GPT(self.width, self.layers, CONTEXT)


REFERENCE = Model(256, 3, 4)  # one of the fit's
ALONE = "alone"


def strategies_of(replicas: int, ranks: int) -> dict[str, int | None]:
    """Those that differ, and how many replicas each has. As many replicas as ranks leave nothing to shard."""
    return {
        name: replicas if strategy.hybrid else None
        for name, strategy in STRATEGIES.items()
        if not strategy.hybrid or replicas < ranks
    }


def measure(model: Model, replicas: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of each round on the slowest rank, by strategy; `replicas` are hybrid_shard's.

    By the name of `ALONE` are those of `REFERENCE`, which each rank trains by itself.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = shardcomm.Communicator.from_process_group()
    shape = replicas, comm.size // replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    measured = _samples(model, comm, mesh, rounds)
    comm.close()
    dist.destroy_process_group()
    return measured


def _samples(
    model: Model, comm: shardcomm.Communicator, mesh: DeviceMesh, rounds: int
) -> dict[str, list[float]]:
    tokens = torch.randint(0, VOCAB, (model.sequences, CONTEXT + 1))
    reference = torch.randint(0, VOCAB, (REFERENCE.sequences, CONTEXT + 1))
    with ExitStack() as engines:
        nets = {}
        for strategy, replicas in strategies_of(mesh.size(0), comm.size).items():
            nets[strategy] = net = model.made()
            where = comm if replicas is None else mesh
            engine = shardcomm.fully_shard(net, where, units=list(net.blocks), strategy=strategy)
            engines.callback(engine.close)
        nets[ALONE] = net = REFERENCE.made()
        (itself,) = shardcomm.Communicator.local_group(1)
        engines.callback(shardcomm.fully_shard(net, itself).close)
        times: dict[str, list[float]] = {strategy: [] for strategy in nets}
        for round_ in range(rounds + WARM_UP):
            for strategy, net in nets.items():
                seconds = timed(net, reference if strategy == ALONE else tokens)
                if round_ >= WARM_UP:
                    times[strategy].append(seconds)
    return times


def costs() -> Costs:
    """What a rank measures between hosts."""
    torch.set_num_threads(1)
    with shardcomm.Communicator.from_env() as comm:
        return measured_costs(comm)


def timed(net: torch.nn.Module, tokens: torch.Tensor) -> float:
    net.zero_grad(set_to_none=True)
    dist.barrier()
    begin = time.perf_counter()
    logits = net(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)
