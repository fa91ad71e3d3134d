"""What a call simulates: a configuration or several, each a line of its table."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardcomm.cli.models import attention_of, model_of
from shardcomm.cli.precision import precision_of
from shardcomm.planner.planner import MemoryPlan
from shardcomm.schedule.strategy import STRATEGIES
from shardcomm.simulate.machine import Machine
from shardcomm.simulate.simulation import Simulation
from shardcomm.simulate.stragglers import slowest_factors
from shardcomm.simulate.unit_times import UnitTime, times_by_flops, times_of_trace
from shardcomm.trace.timeline import Timeline

_SWEPT_PREFETCH = (0, 1, 2)


@dataclass(frozen=True)
class Outcome:
    """What came of a configuration.

    Attributes:
        simulation: The step of median duration.
        prefetch: How many units are gathered ahead.
        tokens: The tokens of a step on a rank.
        p95_s: What 95 % of steps last at most.
    """

    simulation: Simulation
    prefetch: int
    tokens: int
    p95_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens that a rank trains on in a second."""
        step_s = self.simulation.step_s
        return self.tokens / step_s if step_s else 0.0

    def figures(self) -> dict[str, Any]:
        """All figures, flat."""
        return {
            **self.simulation.figures(),
            "prefetch": self.prefetch,
            "p95_s": self.p95_s,
            "tokens_per_s_per_rank": self.tokens_per_s,
        }


def outcomes(args: argparse.Namespace) -> Iterator[Outcome]:
    """Simulates what the options ask for, one configuration after the other.

    Raises:
        OSError: A file cannot be read.
        ValueError: Options do not fit each other, or a file is not what it should be.
    """
    if args.reduce_format is not None and args.strategy not in ("full_shard", "shard_grad_op"):
        raise ValueError(
            f"--reduce-format is {args.reduce_format!r}; it needs --strategy full_shard or shard_grad_op: replicas sum "
            "in float32"
        )
    machine = Machine.load(args.machine)
    model = model_of(args, args.context)
    tokens = args.batch * args.context
    depth = 1 if args.prefetch is None else args.prefetch
    times = _times(args, model, machine, tokens)
    for ranks in _ranks(args, machine):
        for strategy, replicas in _strategies(args, machine, ranks):
            for prefetch in _SWEPT_PREFETCH if args.sweep else (depth,):
                plan = _plan(args, model, ranks, strategy, replicas, prefetch)
                yield _outcome(args, plan, times, machine, prefetch, tokens)


def _times(
    args: argparse.Namespace, model: nn.Module, machine: Machine, tokens: int
) -> tuple[UnitTime, ...]:
    if args.times is None:
        attention = attention_of(args, args.context)
        return times_by_flops(
            model, machine, tokens=tokens, attention=attention, recompute=args.recompute
        )
    if args.recompute:
        raise ValueError("--recompute and --times exclude each other: the trace has what was done")
    numels = {unit.name: unit.numel for unit in MemoryPlan.of(model, 1).units}
    traced = Timeline.load(args.times)
    times = times_of_trace(traced, list(numels))
    for name, numel in numels.items():
        found = traced.units.get(name, numel)
        if found != numel:
            raise ValueError(
                f"the trace is of another model: its {name!r} has {found:,} parameters and the model's {numel:,}"
            )
    if traced.tokens not in (0, tokens):
        raise ValueError(
            f"the trace is of steps of {traced.tokens:,} tokens a rank; --batch and --context make {tokens:,}"
        )
    return times


def _ranks(args: argparse.Namespace, machine: Machine) -> list[int]:
    """The numbers of ranks; for a sweep the doublings from one host on, and what they end at."""
    if not args.sweep:
        return [args.ranks]
    swept = [min(args.ranks, machine.ranks_per_host)]
    while swept[-1] < args.ranks:
        swept.append(min(swept[-1] * 2, args.ranks))
    return swept


def _strategies(
    args: argparse.Namespace, machine: Machine, ranks: int
) -> list[tuple[str, int | None]]:
    """The strategies with their replicas; hybrid_shard has one a host, unless the options say how many."""
    hosts, left = divmod(ranks, machine.ranks_per_host)
    replicas = args.replicas or (hosts if hosts > 1 and not left else None)
    if args.strategy is not None:
        return [(args.strategy, replicas if STRATEGIES[args.strategy].hybrid else args.replicas)]
    strategies = [(name, replicas if how.hybrid else None) for name, how in STRATEGIES.items()]
    return [each for each in strategies if replicas or not STRATEGIES[each[0]].hybrid]


def _plan(
    args: argparse.Namespace,
    model: nn.Module,
    ranks: int,
    strategy: str,
    replicas: int | None,
    prefetch: int,
) -> MemoryPlan:
    reshards = STRATEGIES[strategy].reshard_after_forward or strategy == args.strategy
    return MemoryPlan.of(
        model,
        ranks,
        strategy=strategy,
        replicas=replicas,
        mixed_precision=precision_of(args, args.reduce_format),
        prefetch=prefetch,
        backward_prefetch=args.backward_prefetch,
        slots=args.slots,
        reshard_after_forward=args.reshard_after_forward if reshards else None,
    )


def _outcome(
    args: argparse.Namespace,
    plan: MemoryPlan,
    times: tuple[UnitTime, ...],
    machine: Machine,
    prefetch: int,
    tokens: int,
) -> Outcome:
    factors = [1.0]
    if args.stragglers:
        factors = slowest_factors(args.stragglers, plan.ranks, args.steps or 100, args.seed or 0)
    factors.sort()
    slow = factors[math.ceil(0.95 * len(factors)) - 1]
    median = Simulation.of(plan, times, machine, slowest=statistics.median_high(factors))
    p95 = Simulation.of(plan, times, machine, slowest=slow)
    return Outcome(median, prefetch, tokens, p95.step_s)
