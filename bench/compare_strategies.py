"""Each strategy against PyTorch's equal: time of forward + backward, and peak memory.

    full_shard      FSDP2 that reshards after forward                     2 ranks
    shard_grad_op   FSDP2 that does not                                   2 ranks
    no_shard        DDP                                                   2 ranks
    hybrid_shard    FSDP2 on a 2-D mesh: groups of 2 ranks, replicated    4 ranks

The model and the timing are compare_fsdp2.py's: a GPT in float32 on this machine, one thread a rank, PyTorch on Gloo.
Both contenders take turns in the same processes, and their losses must be equal.

Memory is measured in fresh processes, one set for each contender: the peak of a rank's resident memory over some
forwards and backwards, less what was resident after those of a small model. That is parameters, gradients, activations
and communication buffers; neither code, nor an optimizer's state, equal on both sides. A page that ranks share counts
once a host: the peak's shared pages (windows, there from the first step on) are replaced by Pss_Shmem, in which the
kernel divides each page by the number of processes that map it. The mean over the ranks is the host's total / ranks.
"Resident" is with malloc as it comes, which keeps much of what is freed; "in use" with one that returns it at once.
"""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from compare_fsdp2 import BATCH, CONTEXT, model, timed
from harness import Bound, Report, Times, arguments
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardcomm
from shardcomm.models.gpt import GPT, VOCAB

MESHES = {"full_shard": (2,), "shard_grad_op": (2,), "no_shard": (2,), "hybrid_shard": (2, 2)}
WARM_UP = 2
M_MMAP_THRESHOLD = -3  # of mallopt: blocks from this size on are mapped, and unmapped when freed
MIB = 1 << 20


def ours(net: GPT, strategy: str, mesh: DeviceMesh) -> torch.nn.Module:
    shardcomm.fully_shard(net, mesh, units=list(net.blocks), strategy=strategy)
    return net


def theirs(net: GPT, strategy: str, mesh: DeviceMesh) -> torch.nn.Module:
    if strategy == "no_shard":
        return DistributedDataParallel(net)
    reshard = strategy != "shard_grad_op"
    for block in net.blocks:
        fsdp2_fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fsdp2_fully_shard(net, mesh=mesh)  # gathered from start to end, as our root
    return net


CONTENDERS: dict[str, Callable[[GPT, str, DeviceMesh], torch.nn.Module]] = {
    "shardcomm": ours,
    "PyTorch": theirs,
}


def start(strategy: str) -> tuple[DeviceMesh, torch.Tensor]:
    """This rank's mesh and batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=generator)
    shape = MESHES[strategy]
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names), tokens


def time_main(strategy: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by contender."""
    mesh, tokens = start(strategy)
    nets = {name: make(model(), strategy, mesh) for name, make in CONTENDERS.items()}
    times: dict[str, list[float]] = {name: [] for name in nets}
    for round_ in range(rounds + WARM_UP):
        losses = []
        for name, net in nets.items():
            seconds, loss = timed(net, tokens)
            losses.append(loss)
            if round_ >= WARM_UP:
                times[name].append(seconds)
        assert len(set(losses)) == 1, losses
    dist.destroy_process_group()
    return times


def memory_main(strategy: str, name: str, in_use: bool) -> int:
    """Bytes this rank adds to the host's memory at its peak."""
    if in_use:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    mesh, tokens = start(strategy)
    small = CONTENDERS[name](GPT(64, 1, CONTEXT), strategy, mesh)  # imports, threads, code
    timed(small, tokens)
    before = status_bytes("RssAnon") + status_bytes("Pss_Shmem", "smaps_rollup")
    net = CONTENDERS[name](model(), strategy, mesh)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: man 5 proc
    for _ in range(WARM_UP + 1):
        timed(net, tokens)
    private = status_bytes("VmHWM") - status_bytes("RssShmem") - status_bytes("RssFile")
    shared = status_bytes("Pss_Shmem", "smaps_rollup")
    dist.barrier()  # until all have counted who maps the windows
    dist.destroy_process_group()
    return private + shared - before


def status_bytes(name: str, file: str = "status") -> int:
    text = Path("/proc/self", file).read_text()
    return 1024 * int(text.partition(f"{name}:")[2].split()[0])


def peak_bytes(strategy: str, name: str, in_use: bool) -> float:
    ranks = math.prod(MESHES[strategy])
    peaks = shardcomm.launch(memory_main, ranks, (strategy, name, in_use), timeout_s=300)
    return statistics.mean(peaks)


def compare(strategy: str, rounds: int, report: Report) -> None:
    """Adds the strategy's figures, a row and a bound each."""
    ranks = math.prod(MESHES[strategy])
    samples = shardcomm.launch(time_main, ranks, (strategy, rounds), timeout_s=600)[0]
    times = {name: Times(tuple(each)) for name, each in samples.items()}
    in_use, resident = (
        {name: peak_bytes(strategy, name, flag) for name in CONTENDERS} for flag in (True, False)
    )

    def add(figure: str, values: dict[str, float], texts: list[str]) -> None:
        name = f"{strategy}, {ranks} ranks: {figure}"
        ratio = values["shardcomm"] / values["PyTorch"]
        report.row(name, *texts, f"{ratio:.2f}")
        report.figures[name] = values
        report.bounds.append(Bound(f"{name} / PyTorch's", ratio, at_most=1.0))

    add("time", {name: t.median for name, t in times.items()}, [str(t) for t in times.values()])
    for figure, peaks in (("peak in use", in_use), ("peak resident", resident)):
        add(figure, peaks, [f"{peak / MIB:.1f} MiB" for peak in peaks.values()])
    report.figures[f"{strategy}, {ranks} ranks: samples_s"] = samples


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    report = Report(["", *CONTENDERS, "ratio"])
    for strategy in MESHES:
        compare(strategy, args.rounds, report)
    report.finish(args)


if __name__ == "__main__":
    main()
