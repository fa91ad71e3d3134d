"""`fully_shard`: the one call that turns a model into a sharded one, with the engine that trains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcomm import optimizer_steps
from shardcomm._C import CommError
from shardcomm.agreement import Item, difference, layout_items
from shardcomm.communicator import Communicator
from shardcomm.engine import Engine
from shardcomm.gradients import OnNonfinite
from shardcomm.groups import GranularityOf, Group, ShardDimOf, group_params
from shardcomm.mesh import Mesh
from shardcomm.mixed_precision import MixedPrecision
from shardcomm.planner import Plan
from shardcomm.schedule import Schedule, Trigger
from shardcomm.shard_units import shard_units
from shardcomm.sharded_modules import is_sharded, remember
from shardcomm.sharded_unit import Footprint, ShardedUnit
from shardcomm.strategy import Strategy
from shardcomm.unit import UnitParams, Units, find_units, registration_order


def fully_shard(
    model: nn.Module,
    comm: Communicator | DeviceMesh | Mesh,
    *,
    units: Units = None,
    strategy: str = "full_shard",
    mixed_precision: MixedPrecision | None = None,
    prefetch: int = 1,
    backward_prefetch: int | None = None,
    slots: int | None = None,
    granularity: GranularityOf = "row",
    shard_dim: ShardDimOf = 0,
    cpu_offload: bool = False,
    on_nonfinite: OnNonfinite = None,
) -> Engine:
    """Shards `model`'s parameters, gradients and, through them, the optimizer's state over the ranks of `comm`.

    Afterwards `model.parameters()` are this rank's rows of each parameter; make the optimizer from them (one made
    before is refused at its first step). Forward, backward and the optimizer's step are written as without sharding;
    what rows alone would give a wrong answer to is refused, or answered for the whole (`ShardedParameter`). To keep a
    `.grad` past the next backward, clone it: its memory may be used again. All ranks start from rank 0's values. A
    model on the meta device is materialised unit by unit, by its modules' `reset_parameters`.

    Args:
        model: changed in place; its buffers move to the device of `comm`. Compile its blocks (`block.compile()`)
            before.
        comm: the ranks: a Communicator or a torch DeviceMesh of one dimension; for "hybrid_shard" a DeviceMesh of two,
            whose first replicates and whose second shards (as in PyTorch FSDP2), or a `shardcomm.Mesh`. Every rank
            calls `fully_shard` with the same model and arguments.
        units: whose parameters are gathered together: modules, module classes, or None for the entries of every
            `nn.ModuleList` that have a forward. What they leave belongs to the model itself, gathered from a step's
            start to its end.
        strategy: "full_shard" (ZeRO-3), "shard_grad_op" (ZeRO-2), "hybrid_shard" (ZeRO-3 in groups of ranks, data
            parallel between them) or "no_shard" (data parallel).
        mixed_precision: dtypes to compute and communicate in; the shards keep the parameters' own.
        prefetch: how many units ahead are gathered while one computes, in forward.
        backward_prefetch: the same in backward (default: as `prefetch`).
        slots: full-size buffers that the units share (default: one more than the deeper prefetch).
        granularity: the smallest piece of a parameter that stays on one rank: "element", "row", `Block(rows)` or
            "tensor" (one rank owns it, its gradient and its optimizer state; the others have none of it). One for all,
            or a function of a parameter's name and the parameter.
        shard_dim: the dim whose indices are the rows that ranks share out, given in the same way; -1 is the last.
            "auto" takes the dims that make the least padding. A rank's rows are a slice along it, in the parameter's
            own order of dims; the full parameter is a strided view, which some of PyTorch's kernels read more slowly.
        cpu_offload: keeps shards, gradients and, through them, the optimizer's state in host memory: the parameters
            that the optimizer updates are CPU tensors. A gather copies a shard to the device first, a reduce copies
            the gradient back, beside computation; that memory is pinned, in blocks which torch rounds up to a power
            of two. As PyTorch FSDP2's `CPUOffloadPolicy()`. Ranks on a CPU gain nothing by it, but do the same.
        on_nonfinite: what a backward does on every rank when a gradient, reduced over the ranks, is NaN or Inf: "raise"
            a FloatingPointError that names the units, or "skip" them: it leaves no parameter a `.grad`, so that the
            optimizer's step passes over all, and `engine.nonfinite` names the units. What writes a gradient
            looks at it on the way, at little cost (see `Communicator.reduce_scatter`); on a GPU, the host waits for the
            result. Leave it None with a GradScaler, which looks for itself.

    Raises:
        TypeError: `model` is no module, `comm` none of these, or `cpu_offload` no bool.
        ValueError: an argument is out of its range, or the model is sharded already, or has something that cannot
            be (the message names it).
        CommError: a rank is missing, or called with another model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"fully_shard: model is a {type(model).__name__}; it must be a torch.nn.Module"
        )
    if not isinstance(mixed_precision, MixedPrecision | None):
        raise TypeError(
            f"fully_shard: mixed_precision is {mixed_precision!r}; it must be a shardcomm.MixedPrecision"
        )
    if on_nonfinite not in (None, "raise", "skip"):
        raise ValueError(
            f"fully_shard: on_nonfinite is {on_nonfinite!r}; accepted: 'raise', 'skip', None"
        )
    if any(map(is_sharded, model.modules())):
        raise ValueError("fully_shard: model, or a module of it, is sharded already")
    how = Strategy.named(strategy)
    found = find_units(model, units)
    order = registration_order(found)
    schedule_of = partial(
        Schedule.plan,
        strategy=how.scheduled(cpu_offload=cpu_offload),
        prefetch=prefetch,
        backward_prefetch=backward_prefetch,
    )
    first_guess = schedule_of(order, slots=slots)
    mesh = Mesh.of(comm, how)

    def plan(order: Sequence[Trigger], backward: bool) -> Schedule:
        return schedule_of(order, slots=first_guess.slot_of, backward=backward)

    precision = mixed_precision or MixedPrecision()
    groups = [
        group_params(
            unit, mesh.shard.size, precision, granularity, shard_dim, cpu_offload=cpu_offload
        )
        for unit in found
    ]
    ranks = (mesh.replicate.size, mesh.shard.size)
    planned = Plan.of_groups(found, groups, how, first_guess, ranks)
    call = {
        "strategy": repr(how.name),
        "mixed_precision": repr(precision),
        "prefetch": repr(prefetch),
        "backward_prefetch": repr(backward_prefetch),
        "slots": repr(slots),
        "cpu_offload": repr(cpu_offload),
        "on_nonfinite": repr(on_nonfinite),
        "(replicas, shards)": repr(ranks),
    }
    items = [Item("the call", call), *_items(model, found, groups)]
    with mesh.failing_together:
        differs = difference((mesh.shard, mesh.replicate), items)
    if differs:  # the ranks agree on that, and can go on to use their communicators
        raise CommError(f"fully_shard: ranks differ: {differs}")
    with mesh.failing_together:
        sharded = shard_units(found, groups, mesh, first_guess.slot_of, mesh.streams)
    _check(sharded, planned)
    trained = _trained(sharded)

    @cache  # once
    def check() -> None:
        if _trained(sharded) == trained:  # else the plan was of another model
            _check(sharded, planned)

    engine = Engine(
        model,
        mesh,
        sharded,
        plan,
        order,
        check,
        precision,
        on_nonfinite,
        owns_mesh=isinstance(comm, DeviceMesh),
    )
    optimizer_steps.install()
    remember(model)
    return engine


def _items(
    model: nn.Module, units: Sequence[UnitParams], groups: Sequence[Sequence[Group]]
) -> Iterator[Item]:
    """What the other ranks' collectives take for granted of this one's model."""
    names = {module: name for name, module in model.named_modules()}
    for unit, unit_groups in zip(units, groups, strict=True):
        yield Item(f"unit {unit.name!r}", {})
        for owned in unit.params:
            places = [f"{names[module]}.{attribute}" for module, attribute in owned.places]
            yield Item(f"parameter {owned.name!r}", {"places": repr(places)})
        for group in unit_groups:
            shared = {
                "dtype": str(group.dtype),
                "requires_grad": str(group.trainable),
                "param_dtype": str(group.param_dtype),
                "reduce_dtype": str(group.reduce_dtype),
            }
            yield from layout_items(group.layout, shared)


def _check(units: Sequence[ShardedUnit], plan: Plan) -> None:
    """RuntimeError if `units` hold other than planned, by a byte; of gradients, those of units that were reduced."""
    gradient_bytes = sum(
        planned.gradient_bytes
        for planned, unit in zip(plan.units, units, strict=True)
        if any(bucket.gradients.nbytes for bucket, _ in unit.buckets)
    )
    planned = asdict(replace(plan.footprint, gradient_bytes=gradient_bytes))
    held = asdict(Footprint.of(units))
    wrong = [
        f"{name} is {held[name]:,} and not {count:,}"
        for name, count in planned.items()
        if held[name] != count
    ]
    if wrong:
        raise RuntimeError(
            f"fully_shard: this rank holds other than planned: {', '.join(wrong)}; please report this"
        )


def _trained(units: Sequence[ShardedUnit]) -> list[bool]:
    return [param.shard.requires_grad for unit in units for param in unit.params]
