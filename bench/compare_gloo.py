"""All-gather and reduce-scatter between local processes: shardcomm's shm against torch's Gloo and Open MPI.

float32; sizes are total bytes, as nccl-tests prints them. "communication memory" is what the engine uses: the gather's
output in the shared window, the reduce's input in a reduce window; "private" starts from and ends in ordinary memory.
A time is the slowest rank's, from a common start; medians over rounds in which all peers of this process take turns
(Open MPI runs as a job of its own, right after). The limit is the time of plain memcpy of the bytes that one rank has
to move at least. Results are checked in the same run, on random integers, whose sums are exact.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Bound, Report, Times, arguments

import shardcomm

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
RANKS = (2, 4)
OPS = ("all_gather", "reduce_scatter")
SPEEDUP = {"all_gather": 8.0, "reduce_scatter": 4.0}  # over Gloo, from LARGE bytes on
LARGE = 16 << 20
SMALL_SPEEDUP = 5.0
MPI_SPEEDUP = 1.7

Timings = dict[str, list[float]]  # "op/size/peer" -> seconds of each round


def rounds_for(size: int) -> int:
    return 300 if size <= 1 << 10 else 15


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
    inner = 10 if size <= 1 << 10 else 1
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
    shard, private = shards[rank].clone(), torch.empty(numel)
    window = comm.allocate(numel, use="gather")
    sent = comm.allocate(numel, use="reduce")
    sent.copy_(inputs[rank])
    reduced = torch.empty(part)
    runs: dict[str, tuple[Callable[[], object], torch.Tensor]] = {
        "all_gather/shm": (lambda: comm.all_gather(window, shard), window),
        "all_gather/shm private": (lambda: comm.all_gather(private, shard), private),
        "all_gather/gloo": (lambda: dist.all_gather_into_tensor(private, shard), private),
        "reduce_scatter/shm": (lambda: comm.reduce_scatter(reduced, sent), reduced),
        "reduce_scatter/shm private": (
            lambda: comm.reduce_scatter(reduced, inputs[rank]),
            reduced,
        ),
        "reduce_scatter/gloo": (
            lambda: dist.reduce_scatter_tensor(reduced, inputs[rank]),
            reduced,
        ),
    }
    mine = slice(rank * part, (rank + 1) * part)
    expected = {
        "all_gather": torch.cat(shards),
        "reduce_scatter": torch.stack([values[mine] for values in inputs]).sum(0),
    }
    for name, (run, result) in runs.items():
        result.zero_() if result is not window else None
        comm.barrier()
        run()
        assert torch.equal(result, expected[name.split("/")[0]]), (name, size)
    # What a rank must touch at least: its own shard read and written; its slice of every input read, the sum written.
    touched = {"all_gather": part, "reduce_scatter": part * (ranks + 1) // 2}
    copies = {f"{op}/memcpy": copy_of(elements) for op, elements in touched.items()}
    return {name: run for name, (run, _result) in runs.items()} | copies


def copy_of(elements: int) -> Callable[[], object]:
    source, target = torch.ones(2, elements).unbind()
    return lambda: target.copy_(source)


def open_mpi(ranks: int) -> Timings | str:
    """Open MPI's times, or why there are none."""
    mpicc, mpirun = shutil.which("mpicc"), shutil.which("mpirun")
    if mpicc is None or mpirun is None:
        return "mpicc and mpirun not found (Debian: openmpi-bin libopenmpi-dev)"
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "openmpi")
        source = Path(__file__).with_name("openmpi.c")
        subprocess.run([mpicc, "-O2", "-o", program, str(source)], check=True)
        sizes = [f"{size}:{rounds_for(size)}" for size in SIZES]
        done = subprocess.run(
            [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), program, *sizes],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
    if done.returncode != 0:
        return f"mpirun failed: {done.stderr.strip()[-300:]}"
    timings: Timings = json.loads(done.stdout)
    return timings


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report(
        [
            "operation",
            "ranks",
            "size",
            "shm",
            "shm private",
            "Gloo",
            "Open MPI",
            "x Gloo",
            "x MPI",
            "of memcpy",
        ]
    )
    for ranks in RANKS:
        timings: Timings = shardcomm.launch(rank_main, ranks, timeout_s=600)[0]
        mpi = open_mpi(ranks)
        if isinstance(mpi, str):
            print(f"Open MPI is left out: {mpi}")
        else:
            timings |= mpi
        for op in OPS:
            for size in SIZES:
                add_row(report, op, ranks, size, timings)
    report.finish(args)


def add_row(report: Report, op: str, ranks: int, size: int, timings: Timings) -> None:
    def of(peer: str) -> Times:
        return Times(tuple(timings[f"{op}/{size}/{peer}"]))

    ours, gloo, copy = of("shm"), of("gloo"), of("memcpy")
    name = f"{op} {size} B {ranks} ranks"
    small = size <= 1 << 10
    speedup = gloo.median / ours.median
    wanted = SMALL_SPEEDUP if small else SPEEDUP[op] if size >= LARGE else None
    if wanted is not None:
        report.bounds.append(Bound(f"{name}, x Gloo", speedup, at_least=wanted))
    figures = {peer: of(peer).median for peer in ("shm", "shm private", "gloo", "memcpy")}
    mpi_text = mpi_ratio = "-"
    if f"{op}/{size}/mpi" in timings:
        mpi = of("mpi")
        figures["mpi"] = mpi.median
        mpi_text, ratio = str(mpi), mpi.median / ours.median
        mpi_ratio = f"{ratio:.1f}"
        if size >= LARGE:
            report.bounds.append(Bound(f"{name}, x Open MPI", ratio, at_least=MPI_SPEEDUP))
    report.figures[name] = figures
    report.row(
        op,
        ranks,
        f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB",
        ours,
        of("shm private"),
        gloo,
        mpi_text,
        f"{speedup:.1f}",
        mpi_ratio,
        "-" if small else f"{copy.median / ours.median:.0%}",
    )


if __name__ == "__main__":
    main()
