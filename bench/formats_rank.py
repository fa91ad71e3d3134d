"""What a rank of bench/formats.py measures and trains. Of the steps, rank 0 writes the file that it is told."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from compare_fsdp2 import BATCH, CONTEXT, loss_of, model

import shardcomm
from shardcomm import BlockFormat, MixedPrecision
from shardcomm.cli.train.text import Corpus, read_text
from shardcomm.cluster import link_bytes
from shardcomm.models.gpt import GPT, VOCAB

Taken = dict[str, dict[str, dict[str, list[float]]]]  # by batch, format, and what was measured

BASE, ALONE = "float32", "no communication"
HALF = torch.bfloat16
FORMATS: dict[str, MixedPrecision] = {
    BASE: MixedPrecision(),
    "bf16 both, computes in bf16": MixedPrecision(param_dtype=HALF),
    "mxint8 gathers": MixedPrecision(gather_format=BlockFormat("mxint8")),
    "mxint8 gathers, bf16 reduces": MixedPrecision(
        gather_format=BlockFormat("mxint8"), reduce_dtype=HALF, reduce_format=HALF
    ),
    "mxint8 both": MixedPrecision(
        gather_format=BlockFormat("mxint8"), reduce_format=BlockFormat("mxint8")
    ),
    "mxint8 both, reduces stochastic": MixedPrecision(
        gather_format=BlockFormat("mxint8"),
        reduce_format=BlockFormat("mxint8", rounding="stochastic"),
    ),
    "mxfp8 both": MixedPrecision(
        gather_format=BlockFormat("mxfp8"), reduce_format=BlockFormat("mxfp8")
    ),
}
ROUNDS = 5
# Sequences a rank, and tokens of each: those of compare_fsdp2, and so few that float32 waits for the link.
BATCHES = ((BATCH, CONTEXT), (1, 16))


def check(engine: shardcomm.Engine) -> None:
    for errors in (engine.wire_error("gather"), engine.wire_error("reduce")):
        for unit, error in errors.items():
            assert error.seen <= error.bound, (unit, error)
            assert not error.flagged, (unit, error)


def tokens_of(batch: tuple[int, int]) -> str:
    return f"{math.prod(batch)} tokens"


def steps(comm: shardcomm.Communicator) -> Taken:
    """Of each batch, format and round: the seconds, those that all ranks' threads ran, and the bytes into a host."""
    nets, engines = {ALONE: model()}, {}
    for name, precision in FORMATS.items():
        net = nets[name] = model()
        engines[name] = shardcomm.fully_shard(
            net, comm, units=list(net.blocks), mixed_precision=precision
        )
    return {tokens_of(batch): steps_of(batch, comm, nets, engines) for batch in BATCHES}


def steps_of(
    batch: tuple[int, int],
    comm: shardcomm.Communicator,
    nets: Mapping[str, torch.nn.Module],
    engines: Mapping[str, shardcomm.Engine],
) -> dict[str, dict[str, list[float]]]:
    generator = torch.Generator().manual_seed(comm.rank)
    tokens = torch.randint(0, VOCAB, (batch[0], batch[1] + 1), generator=generator)
    taken: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "cpu_seconds": [], "received": []} for name in nets
    }
    for round_ in range(ROUNDS + 1):
        for name, net in nets.items():
            net.zero_grad(set_to_none=True)
            comm.barrier()
            before = link_bytes().received
            comm.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            loss_of(net, tokens).backward()
            seconds = time.perf_counter() - start
            comm.barrier()
            cpu_seconds = torch.tensor(time.process_time() - cpu_start, dtype=torch.float64)
            own = torch.tensor([seconds, link_bytes().received - before], dtype=torch.float64)
            slowest = own.clone()
            comm.all_reduce(slowest, "max")
            comm.all_reduce(cpu_seconds)
            if name in engines:
                check(engines[name])
            if round_:  # the first warms up
                taken[name]["seconds"].append(float(slowest[0]))
                taken[name]["cpu_seconds"].append(float(cpu_seconds))
                taken[name]["received"].append(float(slowest[1]))
    return taken


def trained(name: str) -> list[float]:
    """The loss of each of 1,000 steps, the mean of all ranks."""
    torch.set_num_threads(1)
    with shardcomm.Communicator.from_env(transport="hosts", device="cpu") as comm:
        torch.manual_seed(0)
        net = GPT(64, 2, CONTEXT)
        engine = shardcomm.fully_shard(
            net, comm, units=list(net.blocks), mixed_precision=FORMATS[name]
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        corpus = Corpus(read_text(None), CONTEXT)
        losses = torch.empty(1000)
        for step in range(1000):
            inputs, targets = corpus.batch(0, step, comm.rank, 8)
            logits = net(inputs).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            check(engine)
            losses[step] = loss.detach()
        comm.all_reduce(losses, "avg")
        return losses.tolist()


def main(file: str) -> None:
    torch.set_num_threads(1)
    with shardcomm.Communicator.from_env(transport="hosts", device="cpu") as comm:
        taken = steps(comm)
        if comm.rank == 0:
            Path(file).write_text(json.dumps(taken))


if __name__ == "__main__":
    main(sys.argv[1])
