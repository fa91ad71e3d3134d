"""Each strategy against PyTorch's equal: time of forward + backward, and peak memory.

    full_shard      FSDP2 that reshards after forward                     2 ranks
    shard_grad_op   FSDP2 that does not                                   2 ranks
    no_shard        DDP                                                   2 ranks
    hybrid_shard    FSDP2 on a 2-D mesh: groups of 2 ranks, replicated    4 ranks

The model and the timing are compare_fsdp2.py's: a GPT in float32 on this machine, one thread a rank, PyTorch on Gloo.
Both contenders take turns in the same processes, and their losses must be equal.

Memory is measured in fresh processes, one set for each contender: the peak of a rank's resident memory over three
forwards and backwards, less what was resident before there was a model. It holds parameters, gradients, communication
buffers and activations; an optimizer's state, equal on both sides, is left out. A page that ranks share counts once a
host: the peak's shared pages (windows, there from the first step on) are replaced by Pss_Shmem, in which the kernel
divides each page by the number of processes that map it. The mean over the ranks is the host's total / ranks.
"""

from __future__ import annotations

import ctypes
import gc
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
from shardcomm.train.gpt import VOCAB

MESHES = {"full_shard": (2,), "shard_grad_op": (2,), "no_shard": (2,), "hybrid_shard": (2, 2)}
WARM_UP = 2
MIB = 1 << 20


def ours(strategy: str, mesh: DeviceMesh) -> torch.nn.Module:
    net = model()
    shardcomm.fully_shard(net, mesh, units=list(net.blocks), strategy=strategy)
    return net


def theirs(strategy: str, mesh: DeviceMesh) -> torch.nn.Module:
    net = model()
    if strategy == "no_shard":
        return DistributedDataParallel(net)
    reshard = strategy != "shard_grad_op"
    for block in net.blocks:
        fsdp2_fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fsdp2_fully_shard(net, mesh=mesh)  # gathered from start to end, as our root
    return net


CONTENDERS: dict[str, Callable[[str, DeviceMesh], torch.nn.Module]] = {
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
    nets = {name: make(strategy, mesh) for name, make in CONTENDERS.items()}
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


def memory_main(strategy: str, name: str) -> int:
    """Bytes this rank adds to the host's memory at its peak."""
    mesh, tokens = start(strategy)
    before = status_bytes("VmRSS")
    net = CONTENDERS[name](strategy, mesh)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the model as it was before it was sharded
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: man 5 proc
    for _ in range(WARM_UP + 1):
        timed(net, tokens)
    private = status_bytes("VmHWM") - status_bytes("RssShmem")
    shared = status_bytes("Pss_Shmem", "smaps_rollup")
    dist.barrier()  # until all have counted who maps the windows
    dist.destroy_process_group()
    return private + shared - before


def status_bytes(name: str, file: str = "status") -> int:
    text = Path("/proc/self", file).read_text()
    return 1024 * int(text.partition(f"{name}:")[2].split()[0])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    report = Report(
        ["", "forward + backward", "ours / PyTorch's", "peak memory a rank", "ours / PyTorch's"]
    )
    for strategy, mesh in MESHES.items():
        ranks = torch.Size(mesh).numel()
        measured = shardcomm.launch(time_main, ranks, (strategy, args.rounds), deadline_s=600)[0]
        times = {name: Times(tuple(samples)) for name, samples in measured.items()}
        peaks = {
            name: statistics.mean(
                shardcomm.launch(memory_main, ranks, (strategy, name), deadline_s=300)
            )
            for name in CONTENDERS
        }
        ratios = [
            times["shardcomm"].median / times["PyTorch"].median,
            peaks["shardcomm"] / peaks["PyTorch"],
        ]
        for name in CONTENDERS:
            cells = [f"{ratio:.2f}" if name == "shardcomm" else "" for ratio in ratios]
            row = f"{strategy}, {ranks} ranks, {name}"
            report.row(row, times[name], cells[0], f"{peaks[name] / MIB:.1f} MiB", cells[1])
            report.figures[row] = {
                "median_s": times[name].median,
                "samples_s": times[name].samples,
                "peak_bytes": peaks[name],
            }
        for figure, ratio in zip(("time", "peak memory"), ratios, strict=True):
            report.bounds.append(
                Bound(f"{figure} / PyTorch's: {strategy}, {ranks} ranks", ratio, at_most=1.0)
            )
    report.finish(args)


if __name__ == "__main__":
    main()
