"""What sums="exact" costs: collectives of large messages, beside sums that are rounded at each addition.

Processes of one host over shm, in memory of `allocate`. The elements are random, from a normal distribution; "apart"
are floats of which each rank's are 2^40 times smaller than those of the rank before, for which the fastest ways to sum
exactly do not do. Both communicators are measured in turn within the same rounds. A time is the slowest rank's, from a
common start. Exact sums are compared with those of doubles by math.fsum before, for the first elements.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from harness import Bound, Report, Times, arguments

import shardcomm

RANKS, MIB, ROUNDS = (2, 4), (16, 64), 15
CASES = {
    "f32": (torch.float32, 1.0),
    "bf16": (torch.bfloat16, 1.0),
    "f64": (torch.float64, 1.0),
    "f32, apart": (torch.float32, 2.0**-40),
}
MOST = 1.5

Samples = dict[str, list[float]]  # seconds, "fast" and "exact"


def rank_main() -> dict[tuple[str, str, int], Samples]:
    torch.set_num_threads(1)
    found: dict[tuple[str, str, int], Samples] = {}
    with (
        shardcomm.Communicator.from_env(transport="shm") as fast,
        shardcomm.Communicator.from_env(transport="shm", sums="exact") as exact,
    ):
        for mib in MIB:
            for name, (dtype, apart) in CASES.items():
                runs = {comm.sums: collectives(comm, mib, dtype, apart) for comm in (fast, exact)}
                for operation in runs["fast"]:
                    samples: Samples = {"fast": [], "exact": []}
                    for turn in range(1 + ROUNDS):
                        for sums, run in runs.items():
                            seconds = slowest(run[operation], fast)
                            if turn > 0:
                                samples[sums].append(seconds)
                    found[operation, name, mib] = samples
    return found


def collectives(
    comm: shardcomm.Communicator, mib: int, dtype: torch.dtype, apart: float
) -> dict[str, Callable[[], None]]:
    numel = (mib << 20) // dtype.itemsize
    repeated = 1 << 20
    send = comm.allocate(numel, dtype=dtype, use="reduce")
    recv = torch.empty(numel // comm.size, dtype=dtype)

    def elements(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return (torch.randn(repeated, generator=generator) * apart**rank).to(dtype)

    send.view(-1, repeated).copy_(elements(comm.rank))
    comm.reduce_scatter(recv, send)
    if comm.sums == "exact" and comm.rank == 0:
        columns = zip(*(elements(r)[:64].tolist() for r in range(comm.size)), strict=True)
        sums = [math.fsum(column) for column in columns]
        # A double that fsum has rounded is no tie of a narrower type here.
        assert recv[:64].tolist() == torch.tensor(sums, dtype=torch.float64).to(dtype).tolist()
    runs = {"reduce_scatter": lambda: comm.reduce_scatter(recv, send)}
    if apart == 1.0:  # whose result, on all ranks, is the next call's operand
        runs["all_reduce"] = lambda: comm.all_reduce(send, "avg")
    return runs


def slowest(run: Callable[[], None], comm: shardcomm.Communicator) -> float:
    """Seconds of a call on the slowest rank."""
    comm.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    comm.all_reduce(seconds, "max")
    return float(seconds)


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report(["operation", "elements", "MiB", "ranks", "fast", "exact", "exact / fast"])
    for ranks in RANKS:
        found = shardcomm.launch(rank_main, ranks, timeout_s=300)[0]
        for (operation, name, mib), samples in found.items():
            fast, exact = (Times(tuple(samples[sums])) for sums in ("fast", "exact"))
            ratio = exact.median / fast.median
            report.row(operation, name, mib, ranks, fast, exact, f"{ratio:.2f}")
            case = f"{operation}, {name}, {mib} MiB, {ranks} ranks"
            report.figures[case] = samples
            if name != "f32, apart":
                report.bounds.append(Bound(case, ratio, at_most=MOST))
    report.finish(args)


if __name__ == "__main__":
    main()
