"""Peak memory of each rank against what `MemoryPlan` says, and a model that only sharded ranks can hold.

A chain of Linear layers without activations to speak of (a batch of one row), float32, AdamW, 4 processes over shm.
Compared is the peak of a process's resident memory (VmHWM) over set-up and three steps, less what it held after a small
model of the same kind was trained, so that code and libraries are not counted.

Then the address space of each process is limited (RLIMIT_AS: shared windows count as its own), to what lies half-way
between the two plans: full_shard trains, no_shard cannot.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Bound, Report, arguments
from torch import nn

from shardcomm import Communicator, MemoryPlan, Mesh, RankError, fully_shard, launch

RANKS = 4
REPLICAS = {"no_shard": None, "shard_grad_op": None, "full_shard": None, "hybrid_shard": 2}
HOST_RANKS = 2  # of a host that is played, for secondary shards
STEPS = 3
WITHIN = 0.02
M_MMAP_THRESHOLD = -3  # of mallopt


@dataclass(frozen=True)
class Case:
    """What every rank trains."""

    strategy: str
    layers: int
    width: int
    reshard_after_forward: int | None = None

    def model(self, width: int | None = None) -> nn.Module:
        width = width or self.width
        with torch.device("meta"):
            return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(self.layers)))

    def plan(self) -> MemoryPlan:
        return MemoryPlan.of(
            self.model(),
            RANKS,
            units=nn.Linear,
            strategy=self.strategy,
            replicas=REPLICAS[self.strategy],
            reshard_after_forward=self.reshard_after_forward,
        )


def peak_of(case: Case, limit: int | None = None) -> int:
    """Bytes at the peak; `limit`: how many more than now the process may map."""
    # Memory that is let go of goes back to the system; else what is measured is malloc's keeping.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    torch.set_num_threads(1)
    ranks, host = _ranks(case)
    _train(case, ranks, host, width=64)
    if limit is not None:
        limit += _status("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    _train(case, ranks, host, case.width)
    peak = _status("VmHWM") - before
    ranks.close()
    return peak


def _ranks(case: Case) -> tuple[Communicator | Mesh, Communicator | None]:
    replicas = REPLICAS[case.strategy]
    if replicas is None and case.reshard_after_forward is None:
        return Communicator.from_env(), None
    dist.init_process_group("gloo")
    rows = dist.init_device_mesh("cpu", (RANKS // HOST_RANKS, HOST_RANKS))
    replicate, shard = (Communicator.from_process_group(rows.get_group(dim)) for dim in (0, 1))
    if replicas is None:
        return Communicator.from_process_group(), shard
    return Mesh(shard, replicate), None


def _train(case: Case, ranks: Communicator | Mesh, host: Communicator | None, width: int) -> None:
    model = case.model(width)
    engine = fully_shard(
        model, ranks, units=nn.Linear, strategy=case.strategy, reshard_after_forward=host
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # its step takes no memory
    for _ in range(STEPS):
        model(torch.randn(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def compare(cases: Mapping[str, Case], report: Report) -> None:
    for strategy, case in cases.items():
        planned = case.plan().peak_resident_bytes
        measured = max(launch(peak_of, RANKS, (case,), timeout_s=300))
        report.row(strategy, _mb(planned), _mb(measured), f"{measured / planned:.4f}")
        report.figures[strategy] = {"planned_bytes": planned, "measured_bytes": measured}
        off = abs(measured / planned - 1)
        report.bounds.append(Bound(f"{strategy}, off by", off, at_most=WITHIN))


def limited(cases: Mapping[str, Case], report: Report) -> None:
    holds = {name: cases[name] for name in ("full_shard", "no_shard")}
    limit = sum(case.plan().peak_resident_bytes for case in holds.values()) // 2
    for name, case in holds.items():
        outcome = "trains"
        try:
            launch(peak_of, RANKS, (case, limit), timeout_s=300)
        except RankError as error:
            if "allocate memory" not in str(error):
                raise
            outcome = str(error).splitlines()[-1]
        did = "trains" if outcome == "trains" else "cannot allocate"
        report.row(f"{name}, limited to", _mb(limit), did, "")
        report.figures[f"{name}, limited"] = {"limit_bytes": limit, "outcome": outcome}
        bound = {"at_least": 1.0} if name == "full_shard" else {"at_most": 0.0}
        trains = float(did == "trains")
        report.bounds.append(Bound(f"{name} trains under the limit", trains, **bound))


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    args = parser.parse_args()
    report = Report(["strategy, 4 ranks", "planned", "measured", "ratio"])
    cases = {strategy: Case(strategy, args.layers, args.width) for strategy in REPLICAS}
    secondary = f"full_shard, reshard_after_forward={HOST_RANKS}"
    cases[secondary] = Case("full_shard", args.layers, args.width, HOST_RANKS)
    compare(cases, report)
    limited(cases, report)
    report.finish(args)


if __name__ == "__main__":
    main()
