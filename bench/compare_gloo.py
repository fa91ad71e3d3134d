"""Collectives between local processes: shardcomm's shm, from C and from Python, against torch's Gloo and Open MPI.

float32; sizes are total bytes, as nccl-tests prints them. "window" is memory of Communicator.allocate, which the engine
uses: a gather's output, a reduction's input. Else operands are ordinary memory, as all of the peers' are. A time is the
slowest rank's from a common start, of a call in a row of calls; medians of rounds. From Python, all peers take turns in
each round; of the C programs, Open MPI's (bench/openmpi.c) and ours (bench/collectives.c) take turns, a run each. There
are two limits: the time of plain memcpy of the bytes that one rank has to move at least and, for C, a probe in the same
processes, which gives the same results by the least that ranks with common memory can do (bench/probe.h), the faster of
two ways to store. The C programs' operands are written anew between rows (bench/collectives.h). Results are checked in
the same run.
A row of Open MPI's broadcasts is a pipeline: its root does not wait for the others. Nor does ours up to 272 bytes, 63
times in a row; above, it does.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

import c_programs
import torch
import torch.distributed as dist
from harness import Bound, Report, Times, arguments

import shardcomm

SIZES = (16, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
RANKS = (2, 4)
OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier")
SPEEDUP = {"all_gather": 8.0, "reduce_scatter": 4.0}  # over Gloo, from Python, from LARGE bytes on
LARGE = 16 << 20
SMALL_SPEEDUP = 5.0
MPI_SPEEDUP = 1.7  # from C, into or from a window, from LARGE bytes on
PROBE = 0.9  # of its bandwidth, from LARGE bytes on
PROBED = {
    "all_gather": ", window",
    "reduce_scatter": "",
}  # each byte written once; a copy in and a sum in order
LATENCY_US = {"C": 1.0, "Python": 3.0}  # 1 KiB, 2 ranks, all-gather and reduce-scatter
TURNS, ROUNDS = 5, 9  # of the C programs

Timings = dict[str, list[float]]  # "op/size/peer" -> seconds of each round


def rounds_for(size: int) -> int:
    return 100 if size <= 4 << 10 else 15


def slowest(run: Callable[[], object], comm: shardcomm.Communicator, inner: int) -> float:
    """Seconds a call takes on the slowest rank; `inner` calls in a row, so that a barrier's end does not count."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(inner):
        run()
    seconds = torch.tensor((time.perf_counter() - start) / inner, dtype=torch.float64)
    comm.all_reduce(seconds, "max")
    return float(seconds)


def rank_main() -> Timings:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = shardcomm.Communicator.from_process_group()
    timings: Timings = {}
    for size in SIZES:
        measure(comm, size, timings)
    comm.close()
    dist.destroy_process_group()
    return timings


def measure(comm: shardcomm.Communicator, size: int, timings: Timings) -> None:
    inner = 20 if size <= 4 << 10 else 1
    runs = contenders(comm, size)
    for _ in range(rounds_for(size)):
        for name, run in runs.items():
            op, peer = name.split("/")
            timings.setdefault(f"{op}/{size}/{peer}", []).append(slowest(run, comm, inner))


def contenders(comm: shardcomm.Communicator, size: int) -> dict[str, Callable[[], object]]:
    """What takes turns, by "op/peer"; each has run once, and its result was checked."""
    rank, ranks, numel = comm.rank, comm.size, size // 4
    part = numel // ranks
    inputs = [
        torch.randint(-99, 99, (numel,), generator=torch.Generator().manual_seed(r)).float()
        for r in range(ranks)
    ]
    shards = [values[:part] for values in inputs]
    shard, whole, reduced = shards[rank].clone(), torch.empty(numel), torch.empty(part)
    window, sent, summed = (comm.allocate(numel, use=u) for u in ("gather", "reduce", "reduce"))
    sent.copy_(inputs[rank])
    own = inputs[rank]
    runs: dict[str, tuple[Callable[[], object], torch.Tensor]] = {
        "all_gather/window": (lambda: comm.all_gather(window, shard), window),
        "all_gather/Python": (lambda: comm.all_gather(whole, shard), whole),
        "all_gather/gloo": (lambda: dist.all_gather_into_tensor(whole, shard), whole),
        "reduce_scatter/window": (lambda: comm.reduce_scatter(reduced, sent), reduced),
        "reduce_scatter/Python": (lambda: comm.reduce_scatter(reduced, own), reduced),
        "reduce_scatter/gloo": (lambda: dist.reduce_scatter_tensor(reduced, own), reduced),
        "all_reduce/window": (lambda: comm.all_reduce(summed), summed),
        "all_reduce/Python": (lambda: comm.all_reduce(whole), whole),
        "all_reduce/gloo": (lambda: dist.all_reduce(whole), whole),
        "broadcast/window": (lambda: comm.broadcast(summed, 0), summed),
        "broadcast/Python": (lambda: comm.broadcast(whole, 0), whole),
        "broadcast/gloo": (lambda: dist.broadcast(whole, 0), whole),
        "barrier/Python": (comm.barrier, whole),
        "barrier/gloo": (dist.barrier, whole),
    }
    mine = slice(rank * part, (rank + 1) * part)
    total = torch.stack(inputs).sum(0)
    expected = {
        "all_gather": torch.cat(shards),
        "reduce_scatter": total[mine],
        "all_reduce": total,
        "broadcast": inputs[0],
    }
    for name, (run, result) in runs.items():
        op = name.split("/")[0]
        if op in ("all_reduce", "broadcast"):
            result.copy_(own)  # in place
        comm.barrier()
        run()
        assert op == "barrier" or torch.equal(result, expected[op]), (name, size)
        if op == "all_reduce":
            result.zero_()  # sums of sums grow
    # What a rank must touch at least: its own shard read and written; its slice of every input read, the sum written;
    # both of these; the whole read and written.
    touched = {
        "all_gather": part,
        "reduce_scatter": part * (ranks + 1) // 2,
        "all_reduce": part * (ranks + 1) // 2 + part * (ranks - 1),
        "broadcast": numel,
    }
    copies = {f"{op}/memcpy": copy_of(elements) for op, elements in touched.items()}
    return {name: run for name, (run, _result) in runs.items()} | copies


def copy_of(elements: int) -> Callable[[], object]:
    source, target = torch.ones(2, elements).unbind()
    return lambda: target.copy_(source)


def in_c(ranks: int) -> Timings:
    """Medians of the C programs' runs, which take turns."""
    timings: Timings = {}
    with tempfile.TemporaryDirectory() as folder:
        commands: list[list[object]] = [[c_programs.ours(folder, "collectives"), ranks]]
        if in_mpi := c_programs.openmpi(folder, "openmpi"):
            commands.append(c_programs.under_mpirun(ranks, in_mpi))
        for _ in range(TURNS):
            for command in commands:
                for name, seconds in c_programs.samples_of(*command, ROUNDS, *SIZES).items():
                    timings.setdefault(name, []).append(statistics.median(seconds))
    return timings


def main() -> None:
    args = arguments(__doc__).parse_args()
    columns = ["operation", "ranks", "size", "C", "C, window", "Python", "Python, window", "Gloo"]
    columns += ["Open MPI", "C x MPI", "Python x Gloo", "of memcpy", "probe", "of probe"]
    report = Report(columns)
    for ranks in RANKS:
        timings: Timings = shardcomm.launch(rank_main, ranks, timeout_s=900)[0] | in_c(ranks)
        for op in OPS:
            for size in SIZES[:1] if op == "barrier" else SIZES:
                add_row(report, op, ranks, size, timings)
    report.finish(args)


def add_row(report: Report, op: str, ranks: int, size: int, timings: Timings) -> None:
    case = f"{op}/{size}/"
    of = {
        key.removeprefix(case): Times(tuple(seconds))
        for key, seconds in timings.items()
        if key.startswith(case)
    }
    name = f"{op} {size} B {ranks} ranks"
    best = of.get("window", of["Python"])
    over_gloo = of["gloo"].median / best.median
    wanted = SMALL_SPEEDUP if size == 1 << 10 else SPEEDUP.get(op) if size >= LARGE else None
    if wanted is not None:
        report.bounds.append(Bound(f"{name}, x Gloo", over_gloo, at_least=wanted))
    over_mpi = None
    if "Open MPI" in of:
        over_mpi = of["Open MPI"].median / of["C"].median
        report.bounds.append(Bound(f"{name}, C x Open MPI", over_mpi, at_least=1.0))
        if size >= LARGE and op in SPEEDUP:
            ratio = of["Open MPI"].median / of.get("C, window", of["C"]).median
            report.bounds.append(Bound(f"{name}, x Open MPI", ratio, at_least=MPI_SPEEDUP))
    if size == 1 << 10 and ranks == 2 and op in SPEEDUP:
        for peer, limit in LATENCY_US.items():
            report.bounds.append(Bound(f"{name}, {peer}, us", of[peer].median * 1e6, at_most=limit))
    of["probe"] = min(of["probe"], of.pop("probe, past caches"), key=lambda times: times.median)
    if size >= LARGE and op in PROBED:
        probe, ours = of[f"probe{PROBED[op]}"], of[f"C{PROBED[op]}"]
        ratio = probe.median / ours.median
        report.bounds.append(Bound(f"{name}, of probe", ratio, at_least=PROBE))
    report.figures[name] = {peer: times.median for peer, times in of.items()}
    shown = ("C", "C, window", "Python", "window", "gloo", "Open MPI")
    report.row(
        op,
        ranks,
        "-" if op == "barrier" else text_of(size),
        *(of.get(peer, "-") for peer in shown),
        "-" if over_mpi is None else f"{over_mpi:.2f}",
        f"{over_gloo:.1f}",
        f"{of['memcpy'].median / best.median:.0%}" if size > 4 << 10 and "memcpy" in of else "-",
        of["probe"],
        f"{of['probe'].median / of['C'].median:.0%}",
    )


def text_of(size: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if size >> shift:
            return f"{size >> shift} {unit}"
    return f"{size} B"


if __name__ == "__main__":
    main()
