"""What the engine itself costs: world size 1, 64 tiny units, against the plain model and PyTorch FSDP2.

A chain of 64 Linear(16, 16), float32, forward and backward, one thread. At world size 1 nothing is communicated, so the
difference to the plain model is the time of hooks, bookkeeping and launches, which is given per unit. FSDP2 is measured
in the same rounds, as is the limit of both: hooks that do nothing, by which torch tells of each forward and backward.
Gradients are compared with the plain model's.

With --device fake or cuda: what it costs with peers; see peers_overhead.py.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

if any(each in sys.argv for each in ("fake", "--device=fake")):
    import played_cuda

    played_cuda.install(instant=True)  # before shardcomm is imported

import peers_overhead
import torch
import torch.distributed as dist
from harness import Bound, Report, Times, arguments
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import shardcomm

UNITS, WIDTH = 64, 16


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))


class Told(torch.autograd.Function):
    """Tells of the end of a unit's backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def hook_alone(module: nn.Module) -> None:
    """Has torch tell of each forward of `module`, one that fails too, and of its backward's begin and end."""

    def begin(module: nn.Module, args: tuple[torch.Tensor], kwargs: dict[str, Any]) -> object:
        (x,) = args
        return (Told.apply(x) if x.requires_grad else x,), kwargs

    def end(module: nn.Module, args: object, output: torch.Tensor) -> None:
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(lambda grads: None)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)
    module.register_forward_hook(lambda module, args, output: None, always_call=True)


def seconds_of(net: nn.Module, x: torch.Tensor) -> float:
    net.zero_grad(set_to_none=True)
    start = time.perf_counter()
    net(x).sum().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=250)
    parser.add_argument("--device", choices=["cpu", "fake", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device != "cpu":
        peers_overhead.main(args)
        return
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")

    plain, hooked, ours, fsdp2 = chain(), chain(), chain(), chain()
    for layer in hooked:
        hook_alone(layer)
    comm = shardcomm.Communicator.from_process_group()
    engine = shardcomm.fully_shard(ours, comm, units=nn.Linear)
    mesh = init_device_mesh("cpu", (1,))
    for layer in fsdp2:
        fsdp2_fully_shard(layer, mesh=mesh)
    fsdp2_fully_shard(fsdp2, mesh=mesh)

    x = torch.randn(4, WIDTH)
    nets = {"plain": plain, "hooks alone": hooked, "shardcomm": ours, "FSDP2": fsdp2}
    samples: dict[str, list[float]] = {name: [] for name in nets}
    for round_ in range(args.rounds + 10):
        for name, net in nets.items():
            seconds = seconds_of(net, x)
            if round_ >= 10:
                samples[name].append(seconds)
    for param, mine in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, param.grad, rtol=0, atol=0)
    engine.close()
    comm.close()
    dist.destroy_process_group()

    times = {name: Times(tuple(values)) for name, values in samples.items()}
    base = times["plain"].median
    report = Report(["model", "forward + backward (p10-p90)", "us per unit over plain"])
    overhead = {name: (measured.median - base) / UNITS * 1e6 for name, measured in times.items()}
    for name, measured in times.items():
        report.row(name, measured, f"{overhead[name]:.1f}")
        report.figures[name] = {"median_s": measured.median, "overhead_us": overhead[name]}
    report.bounds.append(
        Bound("overhead / FSDP2's", overhead["shardcomm"] / overhead["FSDP2"], at_most=0.2)
    )
    report.finish(args)


if __name__ == "__main__":
    main()
