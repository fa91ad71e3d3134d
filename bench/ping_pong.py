"""Messages between two processes of a host, from C, beside Open MPI's.

Half the time there and back, with send and recv of ordinary memory. The two C programs (bench/ping_pong.c and
bench/ping_pong_openmpi.c) take turns; what is reported are medians over the turns of the medians of their rounds. Each
program checks what comes back.
"""

from __future__ import annotations

import statistics
import tempfile

import c_programs
from harness import Bound, Report, Times, arguments

SIZES = (8, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
TURNS, ROUNDS = 9, 15
MPI_RATIO = 1.0  # Open MPI's time over ours, at every size


def turns() -> dict[str, c_programs.Samples]:
    """The median seconds of each turn, by whose and by size."""
    samples: dict[str, c_programs.Samples] = {}
    with tempfile.TemporaryDirectory() as folder:
        commands: dict[str, list[object]] = {"C": [c_programs.ours(folder, "ping_pong")]}
        if in_mpi := c_programs.openmpi(folder, "ping_pong_openmpi"):
            commands["Open MPI"] = c_programs.under_mpirun(2, in_mpi)
        for _ in range(TURNS):
            for who, command in commands.items():
                for size, seconds in c_programs.samples_of(*command, ROUNDS, *SIZES).items():
                    median = statistics.median(seconds)
                    samples.setdefault(who, {}).setdefault(size, []).append(median)
    return samples


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report(["size", "C", "Open MPI", "x MPI"])
    samples = turns()
    report.figures.update(samples)
    for size in map(str, SIZES):
        ours = Times(tuple(samples["C"][size]))
        if "Open MPI" not in samples:
            report.row(size, ours, "-", "-")
            continue
        theirs = Times(tuple(samples["Open MPI"][size]))
        ratio = theirs.median / ours.median
        report.row(size, ours, theirs, f"{ratio:.2f}")
        report.bounds.append(Bound(f"{size} B: x MPI", ratio, at_least=MPI_RATIO))
    report.finish(args)


if __name__ == "__main__":
    main()
