"""What a bound all-gather of 1 KiB costs, from C and from Python, beside plain calls and Open MPI's.

In place, into memory that the ranks share; 2 ranks, which are processes, and 1. A time is the slowest rank's, from a
common start, over calls in a row. Each program runs several times, in turn with the others, and gives the median of its
rounds; what is reported are the medians of those.

What a call costs beyond the collective itself: with 1 rank there is nobody to wait for, and in place there is nothing
to copy. What the collective itself takes is then the time of the core's function, called in a C++ loop. A call's time
with 1 rank, minus that of the loop in the same turn, is what the way there and back costs: the checks of a plain call,
the C interface, Python's interpreter and its lock, and the look at whether an operand has moved. The C library and the
extension hold one copy of the core each, and the two copies differ by about 0.01 us.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import c_programs
import torch
from harness import Bound, Report, Times, arguments

import shardcomm

NUMEL = 256
TURNS, ROUNDS, CALLS = 12, 40, 500
LIMITS_US = {"C": 0.3, "Python": 1.0}

Seconds = dict[str, float]  # a call's median over the rounds of one turn, by what was called


def in_python(ranks: int) -> Seconds:
    times: dict[str, list[float]] = shardcomm.launch(rank_main, ranks, timeout_s=120)[0]
    return {f"Python, {name}": statistics.median(each) for name, each in times.items()}


def rank_main() -> dict[str, list[float]]:
    torch.set_num_threads(1)
    with shardcomm.Communicator.from_env(transport="shm") as comm:
        full = comm.allocate(NUMEL, use="gather")
        part = NUMEL // comm.size
        own = full[comm.rank * part :][:part]
        gather = comm.bind_all_gather(full, own)
        own.fill_(comm.rank + 1)
        gather()
        assert full.tolist() == [float(i // part + 1) for i in range(NUMEL)]

        def plain(calls: int) -> None:
            for _ in range(calls):
                comm.all_gather(full, own)

        def bound(calls: int) -> None:
            for _ in range(calls):
                gather()

        runs: dict[str, Callable[[int], None]] = {"plain": plain, "bound": bound}
        if comm.size == 1:
            runs["the core's loop"] = core_of(gather).repeat
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                times[name].append(slowest(run, comm))
    return times


def core_of(gather: shardcomm.BoundCollective) -> shardcomm._C.BoundCollective:
    core = gather.queue.__self__  # type: ignore[attr-defined]
    assert isinstance(core, shardcomm._C.BoundCollective)
    return core


def slowest(run: Callable[[int], None], comm: shardcomm.Communicator) -> float:
    """Seconds of a call on the slowest rank."""
    comm.barrier()
    start = time.perf_counter()
    run(CALLS)
    seconds = torch.tensor((time.perf_counter() - start) / CALLS, dtype=torch.float64)
    comm.all_reduce(seconds, "max")
    return float(seconds)


def of_program(who: str, *command: object) -> Seconds:
    printed = c_programs.samples_of(*command, ROUNDS, CALLS, timeout_s=120)
    return {f"{who}, {name}": statistics.median(times) for name, times in printed.items()}


def turns() -> dict[int, dict[str, list[float]]]:
    """Seconds of a call in each turn, by ranks and by what was called."""
    samples: dict[int, dict[str, list[float]]] = {1: {}, 2: {}}
    with tempfile.TemporaryDirectory() as folder:
        in_c = c_programs.ours(folder, "bound_calls")
        in_mpi = c_programs.openmpi(folder, "bound_calls_openmpi")
        for _ in range(TURNS):
            for ranks in (1, 2):
                found = of_program("C", in_c, ranks) | in_python(ranks)
                if in_mpi:
                    found |= of_program("Open MPI", *c_programs.under_mpirun(ranks, in_mpi))
                for name, seconds in found.items():
                    samples[ranks].setdefault(name, []).append(seconds)
    return samples


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report(["call", "2 ranks", "1 rank", "beyond the collective"])
    samples = turns()
    loop = samples[1].pop("Python, the core's loop")
    report.row("the core's function in a C++ loop", "-", Times(tuple(loop)), "-")
    report.figures["load average"] = os.getloadavg()[0]
    report.figures["core"] = {"1 rank": loop}
    for name, alone in samples[1].items():
        who, kind = name.split(", ")
        two = samples[2][name]
        report.figures[name] = {"2 ranks": two, "1 rank": alone}
        beyond = Times(tuple(a - b for a, b in zip(alone, loop, strict=True)))
        ours = who in LIMITS_US
        report.row(name, Times(tuple(two)), Times(tuple(alone)), beyond if ours else "-")
        if ours and kind == "bound":
            report.bounds.append(
                Bound(f"{name}: beyond, us", beyond.median * 1e6, at_most=LIMITS_US[who])
            )
    report.finish(args)


if __name__ == "__main__":
    main()
