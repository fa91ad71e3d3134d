"""Predicted against measured: the time of a step as the simulator says it, and as the engine takes it.

First the machine is measured, as by `shardcomm bench --fit`: blocks of a GPT on their own, copies, and collectives.
Then GPTs of other sizes train on 2 and 4 ranks over shared memory, float32, one thread a rank, and the simulator
predicts each from its shapes alone. A time is that of the slowest rank from a common start to the end of forward and
backward. Strategies take turns. An error is the prediction over the median, less 1. On 2 cores, 4 ranks share them.

--machine FILE takes that machine instead of measuring it; --only N runs N ranks only.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Bound, Report, Times, arguments
from torch.distributed.device_mesh import init_device_mesh

import shardcomm
from shardcomm.cli.bench.machine import measured_machine
from shardcomm.models.gpt import GPT, VOCAB
from shardcomm.schedule.strategy import STRATEGIES

CONTEXT, WARM_UP = 128, 2
MEDIAN, WORST = 0.05, 0.10  # the errors that are wanted


class Model(NamedTuple):
    width: int
    layers: int
    sequences: int

    def __str__(self) -> str:
        return f"width {self.width}, {self.layers} blocks, {self.sequences} x {CONTEXT} tokens"

    def made(self) -> GPT:
        return GPT(self.width, self.layers, CONTEXT)


MODELS = (Model(192, 6, 2), Model(320, 4, 1), Model(384, 3, 2))  # no size of the fit's


def replicas_of(strategy: str, ranks: int) -> int | None:
    return 2 if STRATEGIES[strategy].hybrid else None


def strategies_of(ranks: int) -> list[str]:
    """Those that differ: of 2 ranks, two replicas leave nothing to shard."""
    return [name for name in STRATEGIES if ranks > 2 or not STRATEGIES[name].hybrid]


def measure(model: Model, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round on the slowest rank, by strategy."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    nets = {}
    for strategy in strategies_of(ranks):
        replicas = replicas_of(strategy, ranks)
        shape = (ranks,) if replicas is None else (replicas, ranks // replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        nets[strategy] = net = model.made()
        shardcomm.fully_shard(net, mesh, units=list(net.blocks), strategy=strategy)
    tokens = torch.randint(0, VOCAB, (model.sequences, CONTEXT + 1))
    times: dict[str, list[float]] = {strategy: [] for strategy in nets}
    for round_ in range(rounds + WARM_UP):
        for strategy, net in nets.items():
            seconds = timed(net, tokens)
            if round_ >= WARM_UP:
                times[strategy].append(seconds)
    dist.destroy_process_group()
    return times


def timed(net: torch.nn.Module, tokens: torch.Tensor) -> float:
    net.zero_grad(set_to_none=True)
    dist.barrier()
    begin = time.perf_counter()
    logits = net(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def predict(model: Model, strategy: str, ranks: int, machine: shardcomm.Machine) -> float:
    with torch.device("meta"):
        net = model.made()
    times = shardcomm.times_by_flops(
        net,
        machine,
        tokens=model.sequences * CONTEXT,
        units=list(net.blocks),
        attention=2 * CONTEXT * model.width,
    )
    plan = shardcomm.MemoryPlan.of(
        net,
        ranks,
        units=list(net.blocks),
        strategy=strategy,
        replicas=replicas_of(strategy, ranks),
    )
    return shardcomm.Simulation.of(plan, times, machine).step_s


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--machine", metavar="FILE")
    parser.add_argument("--only", type=int, choices=[2, 4], help="run this number of ranks only")
    parser.add_argument("--rounds", type=int, default=13)
    args = parser.parse_args()
    machine = (
        measured_machine("here") if args.machine is None else shardcomm.Machine.load(args.machine)
    )
    report = Report(["", "measured", "predicted", "error"])
    report.figures["machine"] = asdict(machine)
    errors = []
    for ranks in (2, 4) if args.only is None else (args.only,):
        for model in MODELS:
            samples = shardcomm.launch(measure, ranks, (model, args.rounds), timeout_s=300)[0]
            for strategy, seconds in samples.items():
                measured = Times(tuple(seconds))
                predicted_s = predict(model, strategy, ranks, machine)
                error = predicted_s / measured.median - 1
                errors.append(abs(error))
                name = f"{strategy}, {ranks} ranks, {model}"
                report.row(name, measured, f"{predicted_s * 1e3:.2f} ms", f"{error:+.1%}")
                report.figures[name] = {"samples_s": seconds, "predicted_s": predicted_s}
    report.row("median error", "", "", f"{statistics.median(errors):.1%}")
    report.row("worst error", "", "", f"{max(errors):.1%}")
    report.bounds.append(Bound("median error", statistics.median(errors), at_most=MEDIAN))
    report.bounds.append(Bound("worst error", max(errors), at_most=WORST))
    report.finish(args)


if __name__ == "__main__":
    main()
