"""Predicted against measured: the time of a step as the simulator says it, and as the engine takes it.

First the machine is measured, as by `shardcomm bench --fit`: blocks of a GPT on their own, copies, and collectives; and
on hosts with a fast link what exchanges and sockets take of a core, and how long threads wait for one. Then GPTs of
other sizes train on 2 and 4 ranks over shared memory, and on 2 and 3 hosts of 2 ranks each, float32, one thread a rank,
and the simulator predicts each from its shapes. Hosts are namespaces of this machine (`shardcomm.cluster`), whose links
`tc` holds to 1 and 5 Gbit/s; where they cannot be made, it says why, and measures one host.

How fast a core is changes from minute to minute, as neighbours of this machine come and go, and with how many ranks it
has. So in the rounds of each model every rank also trains one of the fit's by itself, without communication: what that
takes over what the machine says is the factor by which all that cores do is slower ("cores"). Where it is more than
1.5, somebody else had the cores, and the model is measured again, up to three times; the least disturbed rounds are
taken, whatever their error.

A time is that of the slowest rank from a common start to the end of forward and backward. Strategies take turns. An
error is the prediction over the median, less 1. "In the spread" is a prediction among the middle half of the rounds.
On 2 cores, 4 and 6 ranks share them.

--machine FILE takes that machine instead of measuring it; --only N runs N ranks only, and --only HxN@R H hosts of N
ranks with links of R Gbit/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
from harness import Bound, Report, Times, arguments
from simulate_rank import ALONE, CONTEXT, REFERENCE, Model, costs, measure, strategies_of

import shardcomm
from shardcomm.cli.bench.machine import measured_machine
from shardcomm.cli.bench.network import with_network
from shardcomm.cluster import Cluster, refusal

MEDIAN, WORST = 0.05, 0.10  # the errors that are wanted
DISTURBED, ATTEMPTS = 1.5, 3  # how much slower than the machine the reference may be
MODELS = (Model(192, 6, 2), Model(320, 4, 1), Model(384, 3, 2))  # no size of the fit's
CLUSTER_MODELS = (Model(192, 6, 2), Model(384, 3, 2))
FAST = "100gbit"
BURST_BYTES = 256 << 10  # of the buckets that shape a cluster's links
TIMEOUT_S = 300.0


class Place(NamedTuple):
    """Where ranks are."""

    hosts: int
    ranks: int  # of each host
    rate: int = 0  # of a host's link, in Gbit/s

    def __str__(self) -> str:
        if not self.rate:
            return f"{self.ranks} ranks"
        return f"{self.hosts} x {self.ranks} ranks, {self.rate} Gbit/s"

    @property
    def short(self) -> str:
        return f"{self.hosts}x{self.ranks}@{self.rate}" if self.rate else str(self.ranks)

    @property
    def replicas(self) -> int:
        return max(2, self.hosts)

    @property
    def kind(self) -> str:
        return "several hosts" if self.rate else "one host"

    @property
    def models(self) -> Sequence[Model]:
        return CLUSTER_MODELS if self.rate else MODELS

    def measured(self, model: Model, rounds: int) -> dict[str, list[float]]:
        """The samples of each strategy, and of the reference."""
        args = (model, self.replicas, rounds)
        if not self.rate:
            return shardcomm.launch(measure, self.ranks, args, timeout_s=TIMEOUT_S)[0]
        cluster = Cluster(self.hosts, self.ranks, f"{self.rate}gbit")
        (first, *_) = cluster.run(measure, args, timeout_s=TIMEOUT_S)
        assert first is not None
        return first

    def least_disturbed(
        self, model: Model, rounds: int, alone_s: float
    ) -> tuple[dict[str, list[float]], float]:
        """The samples of the attempt in which the reference was fastest, and how many times `alone_s` it took."""
        attempts = []
        for _ in range(ATTEMPTS):
            samples = self.measured(model, rounds)
            factor = statistics.median(samples[ALONE]) / alone_s
            attempts.append((samples, factor))
            if factor <= DISTURBED:
                break
        return min(attempts, key=lambda attempt: attempt[1])

    def machine(self, here: shardcomm.Machine) -> shardcomm.Machine:
        """What is there of the machine `here`."""
        if not self.rate:
            return replace(here, crowding=1.0)
        (first, *_) = Cluster(self.hosts, self.ranks, FAST).run(costs, timeout_s=TIMEOUT_S)
        assert first is not None
        machine = replace(
            here,
            ranks_per_host=self.ranks,
            cores=here.cores / self.hosts,
            crowding=1.0,
            network_burst_bytes=BURST_BYTES,
            sources={
                **here.sources,
                "ranks_per_host": "the cluster's",
                "cores": "a host's share",
                "crowding": "1: see simulate.py's slower()",
                "network_burst_bytes": "the link's bucket",
            },
        )
        there = with_network(machine, self.hosts * self.ranks, first)
        return replace(
            there,
            network_bytes_per_s=self.rate * 1e9 / 8,
            sources={**there.sources, "network_bytes_per_s": "the link's rate"},
        )


def slower(machine: shardcomm.Machine, factor: float) -> shardcomm.Machine:
    """The machine with cores on which everything takes so many times as long.

    A turn stays as long as it is: slices are of the scheduler, and do not grow.
    """
    rates = (
        "flops_per_s",
        "copy_bytes_per_s",
        "code_bytes_per_s",
        "host_bytes_per_s",
        "socket_bytes_per_s",
    )
    times = ("unit_s", "host_latency_s", "network_latency_s")
    changed = {name: getattr(machine, name) / factor for name in rates}
    changed |= {name: getattr(machine, name) * factor for name in times}
    return replace(machine, **changed)


PLACES = (
    Place(1, 2),
    Place(1, 4),
    *(Place(hosts, 2, rate) for hosts in (2, 3) for rate in (1, 5)),
)


def predict(
    model: Model, strategy: str, ranks: int, replicas: int | None, machine: shardcomm.Machine
) -> float:
    with torch.device("meta"):
        net = model.made()
    times = shardcomm.times_by_flops(
        net,
        machine,
        tokens=model.sequences * CONTEXT,
        units=list(net.blocks),
        attention=2 * CONTEXT * model.width,
    )
    plan = shardcomm.MemoryPlan.of(
        net, ranks, units=list(net.blocks), strategy=strategy, replicas=replicas
    )
    return shardcomm.Simulation.of(plan, times, machine).step_s


def add_rows(report: Report, place: Place, here: shardcomm.Machine, rounds: int) -> list[float]:
    """A row for each model and strategy; returns their errors."""
    errors = []
    ranks = place.hosts * place.ranks
    machine = place.machine(here)
    report.figures[f"machine, {place}"] = asdict(machine)
    alone_s = predict(REFERENCE, "no_shard", 1, None, here) * max(1.0, ranks / here.cores)
    for model in place.models:
        samples, factor = place.least_disturbed(model, rounds, alone_s)
        there = slower(machine, factor)
        for strategy, replicas in strategies_of(place.replicas, ranks).items():
            measured = Times(tuple(samples[strategy]))
            predicted_s = predict(model, strategy, ranks, replicas, there)
            error = predicted_s / measured.median - 1
            errors.append(abs(error))
            name = f"{strategy}, {place}, {model}"
            report.row(
                name,
                measured,
                f"{predicted_s * 1e3:.2f} ms",
                f"{error:+.1%}",
                "yes" if in_spread(samples[strategy], predicted_s) else "",
                f"{factor:.2f}",
            )
            report.figures[name] = {
                "samples_s": samples[strategy],
                "reference_s": samples[ALONE],
                "predicted_s": predicted_s,
                "cores": factor,
            }
    return errors


def in_spread(samples: Sequence[float], predicted_s: float) -> bool:
    """Whether the prediction is among the middle half of the samples."""
    low, _, high = statistics.quantiles(samples, n=4)
    return low <= predicted_s <= high


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--machine", metavar="FILE")
    names = dict.fromkeys(place.short for place in PLACES)
    parser.add_argument("--only", choices=list(names), help="run these ranks only")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    places = [place for place in PLACES if args.only in (None, place.short)]
    if why_not := refusal():
        print(why_not)
        places = [place for place in places if not place.rate]
    here = (
        measured_machine("here") if args.machine is None else shardcomm.Machine.load(args.machine)
    )
    report = Report(["", "measured", "predicted", "error", "in the spread", "cores"])
    report.figures["machine"] = asdict(here)
    errors: dict[str, list[float]] = {}
    for place in places:
        errors.setdefault(place.kind, []).extend(add_rows(report, place, here, args.rounds))
    for kind, of_kind in errors.items():
        for what, error, wanted in (
            ("median error", statistics.median(of_kind), MEDIAN),
            ("worst error", max(of_kind), WORST),
        ):
            name = f"{what}, {kind}"
            report.row(name, "", "", f"{error:.1%}", "", "")
            report.bounds.append(Bound(name, error, at_most=wanted))
    report.finish(args)


if __name__ == "__main__":
    main()
