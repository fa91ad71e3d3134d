"""Forward and backward of a GPT: shardcomm's engine against PyTorch FSDP2, DDP, and no communication at all.

GPT of width 512, 8 blocks, 64 tokens x batch 2 per rank, float32, 2 ranks on this machine, one thread each. FSDP2
and DDP run on Gloo, the only torch backend for CPU ranks in a plain install. The limit is the same model without any
communication, both processes at work. A time is that of the slowest rank from a common start to its end; gradients are
set to None in between. Losses and gradients are compared in the same run.

--drop-in: unmodified FSDP2 on Gloo against the same on shardcomm's backend, and attached at each level; 2 and 4 ranks.
The limit of a backend is FSDP2 on torch's backend "fake", which moves nothing: FSDP2's own copies and hooks remain.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from harness import Bound, Report, Times, arguments
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardcomm.fsdp2
from shardcomm.models.gpt import GPT, VOCAB

WIDTH, LAYERS, CONTEXT, BATCH = 512, 8, 64, 2
PLAIN, UNMOVED, ALONE = "FSDP2 on Gloo", "FSDP2, nothing moved", "no communication"
DROP_IN: dict[str, tuple[str, shardcomm.fsdp2.Level | None]] = {
    PLAIN: ("gloo", None),
    "FSDP2 on shardcomm": ("shardcomm", None),
    "attach, hooks": ("gloo", "hooks"),
    "attach, copies": ("gloo", "copies"),
    "attach, full": ("gloo", "full"),
    UNMOVED: ("fake", None),
}
WANTED = {"FSDP2 on shardcomm": 1.8, "attach, full": 2.1}
NAMES = ("shardcomm", "FSDP2 (Gloo)", "DDP (Gloo)", "no communication")


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(WIDTH, LAYERS, CONTEXT)


def loss_of(net: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = net(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def timed(net: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, float]:
    """Seconds of forward + backward on the slowest rank, and the loss."""
    net.zero_grad(set_to_none=True)
    dist.barrier()
    start = time.perf_counter()
    loss = loss_of(net, tokens)
    loss.backward()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), float(loss.detach())


def full_gradients(engine: shardcomm.Engine) -> dict[str, torch.Tensor]:
    grads = {}
    for unit in engine.units:
        for bucket, params in unit.buckets:
            flat = torch.empty(bucket.layout.flat_numel)
            engine.mesh.shard.all_gather(flat, bucket.grad)
            for param, placement in zip(params, bucket.layout.placements, strict=True):
                piece = flat[placement.offset : placement.offset + placement.numel]
                grads[param.name] = piece.view(placement.spec.shape)
    return grads


def rank_main(rounds: int) -> dict[str, object]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=generator)

    comm = shardcomm.Communicator.from_process_group()
    ours = model()
    engine = shardcomm.fully_shard(ours, comm, units=list(ours.blocks))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fsdp2 = model()
    for block in fsdp2.blocks:
        fsdp2_fully_shard(block, mesh=mesh)
    fsdp2_fully_shard(fsdp2, mesh=mesh)
    engine.traffic.time_waits()
    ddp = DistributedDataParallel(model())
    nets: dict[str, torch.nn.Module] = dict(zip(NAMES, (ours, fsdp2, ddp, model()), strict=True))

    times: dict[str, list[float]] = {name: [] for name in NAMES}
    losses: dict[str, float] = {}
    exposed: list[float] = []
    for round_ in range(rounds + 2):
        for name, net in nets.items():
            before = engine.traffic.exposed_s
            seconds, losses[name] = timed(net, tokens)
            if round_ >= 2:  # the first two warm up
                times[name].append(seconds)
                if net is ours:
                    exposed.append(engine.traffic.exposed_s - before)

    assert len(set(losses.values())) == 1, losses
    expected = {name: param.grad for name, param in ddp.module.named_parameters()}
    for name, grad in full_gradients(engine).items():
        want = expected[name]
        assert want is not None
        torch.testing.assert_close(grad, want, rtol=1e-6, atol=1e-9, msg=name)
    engine.close()
    comm.close()
    dist.destroy_process_group()
    return {
        "times": times,
        "exposed": exposed,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def drop_in_main(rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=generator)
    meshes = {
        backend: DeviceMesh.from_group(dist.new_group(backend=backend), "cpu")
        for backend in ("gloo", "shardcomm", "fake")
    }
    nets: dict[str, torch.nn.Module] = {}
    for name, (backend, level) in DROP_IN.items():
        nets[name] = net = model()
        for block in net.blocks:
            fsdp2_fully_shard(block, mesh=meshes[backend])
        fsdp2_fully_shard(net, mesh=meshes[backend])
        if level is not None:
            shardcomm.fsdp2.attach(net, level=level)
    nets[ALONE] = model()

    times: dict[str, list[float]] = {name: [] for name in nets}
    losses: dict[str, float] = {}
    for round_ in range(rounds + 2):
        for name, net in nets.items():
            seconds, losses[name] = timed(net, tokens)
            if round_ >= 2:  # the first two warm up
                times[name].append(seconds)

    # What is not moved is not right either.
    assert len({loss for name, loss in losses.items() if name != UNMOVED}) == 1, losses
    for name in DROP_IN.keys() - {UNMOVED}:
        for ours, gloos in zip(nets[name].parameters(), nets[PLAIN].parameters(), strict=True):
            torch.testing.assert_close(ours.grad, gloos.grad, rtol=1e-5, atol=1e-8)
    dist.destroy_process_group()
    return times


def drop_in(rounds: int) -> Report:
    report = Report(
        ["forward + backward", "median (p10-p90)", "times faster", "/ no communication"],
        title="The same GPT in unmodified FSDP2: on Gloo, on shardcomm's backend, and attached.",
    )
    for ranks in (2, 4):
        measured = shardcomm.launch(drop_in_main, ranks, (rounds,), timeout_s=600)[0]
        times = {name: Times(tuple(samples)) for name, samples in measured.items()}
        for name, each in times.items():
            row = f"{name}, {ranks} ranks"
            faster = times[PLAIN].median / each.median
            report.row(row, each, f"{faster:.2f}", f"{each.median / times[ALONE].median:.2f}")
            report.figures[row] = {"median_s": each.median, "samples_s": each.samples}
            if name in WANTED:
                report.bounds.append(Bound(f"times faster: {row}", faster, at_least=WANTED[name]))
    return report


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--drop-in", action="store_true", help="compare FSDP2 with and without us")
    args = parser.parse_args()
    if args.drop_in:
        drop_in(args.rounds).finish(args)
        return
    run: Callable[[int], dict[str, object]] = rank_main
    result = shardcomm.launch(run, 2, (args.rounds,), timeout_s=600)[0]
    times = {name: Times(tuple(samples)) for name, samples in result["times"].items()}  # type: ignore[attr-defined]
    ours = times["shardcomm"].median
    report = Report(["forward + backward", "median (p10-p90)", "shardcomm / this"])
    for name, measured in times.items():
        report.row(name, measured, f"{ours / measured.median:.3f}")
        report.figures[name] = {"median_s": measured.median, "samples_s": measured.samples}
    exposed = Times(tuple(result["exposed"]))  # type: ignore[arg-type]
    report.row("shardcomm: of which waiting for communication", exposed, "")
    report.figures["exposed_s"] = exposed.median
    report.bounds = [
        Bound("time / FSDP2", ours / times["FSDP2 (Gloo)"].median, at_most=0.45),
        Bound("time / no communication", ours / times["no communication"].median, at_most=1.3),
    ]
    report.finish(args)


if __name__ == "__main__":
    main()
