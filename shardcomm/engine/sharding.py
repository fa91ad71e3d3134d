"""`fully_shard`: the one call that turns a model into a sharded one, with the engine that trains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import chain

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcomm._C import CommError
from shardcomm.checkpoint.elsewhere import Elsewhere
from shardcomm.comm.agreement import Item, difference, layout_items
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import FailingTogether, Mesh
from shardcomm.engine.engine import Engine
from shardcomm.engine.gradients import OnNonfinite
from shardcomm.engine.meshes import check_secondary, made_for, meshes_of
from shardcomm.engine.shard_units import check_modules, shard_units
from shardcomm.engine.sharded_modules import is_sharded, remember
from shardcomm.meeting.comm_error import comm_error
from shardcomm.parameter import optimizer_steps
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.tensor_parallel import inner_groups
from shardcomm.planner.planner import MemoryPlan, policies_of, schedule_units
from shardcomm.schedule.schedule import Schedule, Trigger
from shardcomm.schedule.strategy import Strategy
from shardcomm.sharded.sharded_unit import ShardedUnit, measured
from shardcomm.unit.groups import BucketGroup, GranularityOf, Pool, ShardDimOf, group_units
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.owners import OwnerCost
from shardcomm.unit.policy import Policy
from shardcomm.unit.unit import UnitParams, Units, find_units, registration_order

_ERROR = "error"
_KINDS = (
    "kinds of units, by comm and strategy, of which every rank needs as many (to one without the experts that others "
    "have, give a unit with Policy(comm=Communicator.local_group(1)[0])):"
)


def fully_shard(
    model: nn.Module,
    comm: Communicator | DeviceMesh | Mesh,
    *,
    units: Units = None,
    ignored_params: Iterable[nn.Parameter] = (),
    strategy: str = "full_shard",
    mixed_precision: MixedPrecision | None = None,
    prefetch: int = 1,
    backward_prefetch: int | None = None,
    slots: int | None = None,
    granularity: GranularityOf = "row",
    shard_dim: ShardDimOf = 0,
    owner_cost: OwnerCost | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: Communicator | int | None = None,
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
            before. Parameters that are DTensors, as `parallelize_module` makes them, are sharded by their local
            tensors: `comm` is then of the ranks that have the same part of them. Other parameters must be used
            alike on all ranks of the DTensors' meshes.
        comm: the ranks: a Communicator or a torch DeviceMesh of one dimension; for "hybrid_shard" a DeviceMesh of two,
            whose first replicates and whose second shards (as in PyTorch FSDP2), or a `shardcomm.Mesh`. Every rank
            calls `fully_shard` with the same model and arguments.
        units: whose parameters are gathered together: modules, module classes, or None for the entries of every
            `nn.ModuleList` that have a forward and are not inside such an entry. What they leave belongs to the model
            itself, gathered from a step's start to its end. A mapping gives each a `Policy`, by which it differs from
            the rest, or None; the model itself may be among them.
        ignored_params: parameters of the model that are left as they are: neither moved, nor made equal on all ranks,
            nor sharded; their gradients are the rank's own. In torch's `clip_grad_norm_` their mean over the ranks
            counts; `Engine.clip_grad_norm_` neither counts nor scales them.
        strategy: "full_shard" (ZeRO-3), "shard_grad_op" (ZeRO-2), "hybrid_shard" (ZeRO-3 in groups of ranks, data
            parallel between them) or "no_shard" (data parallel).
        mixed_precision: dtypes to compute and communicate in; the shards keep the parameters' own.
        prefetch: how many units ahead are gathered while one computes, in forward.
        backward_prefetch: the same in backward (default: as `prefetch`).
        slots: full-size buffers that the units share (default: one more than the deeper prefetch).
        granularity: the smallest piece of a parameter that stays on one rank: "element", "row", `RowBlock(rows)` or
            "tensor" (one rank owns it, its gradient and its optimizer state; the others have none of it). One for all,
            or a function of a parameter's name and the parameter. Owners are chosen over the whole model, so that each
            rank holds about as many bytes (`MemoryPlan` tells how evenly); a unit's shards then differ in length. In a
            unit of both kinds those that are cut and those that are not are gathered and reduced apart.
        shard_dim: the dim whose indices are the rows that ranks share out, given in the same way; -1 is the last.
            "auto" takes the dims that make the least padding. A rank's rows are a slice along it, in the parameter's
            own order of dims; the full parameter is a strided view, which some of PyTorch's kernels read more slowly.
        owner_cost: with granularity "tensor", what it costs to own a parameter, as a function of its name and the
            parameter, where that is not its bytes: for Muon, say, the work on a matrix. Ranks get about equal sums.
        cpu_offload: keeps shards, gradients and, through them, the optimizer's state in host memory: the parameters
            that the optimizer updates are CPU tensors. A gather copies a shard to the device first, a reduce copies
            the gradient back, beside computation; that memory is pinned, in blocks which torch rounds up to a power
            of two. As PyTorch FSDP2's `CPUOffloadPolicy()`. Ranks on a CPU gain nothing by it, but do the same.
        reshard_after_forward: with "full_shard" and "hybrid_shard", the ranks that gather a unit for backward among
            themselves, such as those of this one's host. Each keeps its part of what forward gathered
            (`shardcomm.bucket.secondary_shard`): ZeRO++'s hpZ. A Communicator of some of the ranks that hold a model
            between them, whose number divides theirs; other ranks give their own. With a DeviceMesh also the number of
            ranks, as in PyTorch FSDP2. Values are the same bit for bit. It is for several hosts: on one it takes memory
            and gains nothing.
        on_nonfinite: what a backward does on every rank when a gradient, reduced over the ranks, is NaN or Inf: "raise"
            a FloatingPointError that names them, or "skip" them: it leaves no parameter a `.grad`, so that the
            optimizer's step passes over all, and `engine.nonfinite` names the units. What writes a gradient
            looks at it on the way, at little cost (see `Communicator.reduce_scatter`); on a GPU, the host waits for the
            result. No `.grad` is shown before backward has ended, then. Leave it None with a GradScaler, which looks
            for itself.

    Raises:
        TypeError: `model` is no module, `comm` or `reshard_after_forward` none of these, or `cpu_offload` no bool.
        ValueError: an argument is out of its range, or the model is sharded already, or has something that cannot
            be (the message names it).
        CommError: a rank is missing, or called with another model, or has other parts of DTensors.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"fully_shard: model is a {type(model).__name__}; it must be a torch.nn.Module"
        )
    if on_nonfinite not in (None, "raise", "skip"):
        raise ValueError(
            f"fully_shard: on_nonfinite is {on_nonfinite!r}; accepted: 'raise', 'skip', None"
        )
    if any(map(is_sharded, model.modules())):
        raise ValueError(
            "fully_shard: model, or a module of it, is sharded already; call fully_shard once, with the whole model, "
            "and name the modules to gather one by one in units="
        )
    found = find_units(model, units, ignored_params)
    order = registration_order(found)
    rest = Policy(
        comm,
        Strategy.named(strategy).name,
        mixed_precision or MixedPrecision(),
        prefetch,
        prefetch if backward_prefetch is None else backward_prefetch,
        cpu_offload,
        reshard_after_forward,
    )
    policies = policies_of(found, rest)
    meshes, main = meshes_of(policies, rest)
    numbers = {mesh: number for number, mesh in enumerate(dict.fromkeys([main, *meshes]))}
    pools = [
        Pool(
            numbers[mesh],
            mesh.replicate.size,
            mesh.shard.size,
            mesh.shard.rank,
            mesh.secondary.size if mesh.secondary else 0,
        )
        for mesh in meshes
    ]
    schedule_of = partial(schedule_units, policies=policies, pools=pools)
    together = FailingTogether([*numbers])
    call = {
        _ERROR: repr(None),
        **rest.facts(),
        "slots": repr(slots),
        "on_nonfinite": repr(on_nonfinite),
        "(replicas, shards)": repr((main.replicate.size, main.shard.size)),
        _KINDS: repr(len(numbers)),
    }
    with _told_to_all(main, call, together):
        check_modules(model, main.device)
        first_guess = schedule_of(order, slots=slots)
        inner = inner_groups(owned.distribution for unit in found for owned in unit.params)
        groups = group_units(found, policies, pools, granularity, shard_dim, owner_cost)
        planned = MemoryPlan.of_groups(found, groups, rest, first_guess, pools, main.size)
        items = list(_items(model, found, policies, groups))

    def plan(order: Sequence[Trigger], backward: bool) -> Schedule:
        return schedule_of(order, slots=first_guess.slot_of, backward=backward)

    for mesh in numbers:
        its = [each for each, at in zip(items, meshes, strict=True) if at == mesh]
        with together:
            differs = difference(
                (mesh.shard, mesh.replicate), [Item("the call", call), *chain.from_iterable(its)]
            )
        if differs:  # the ranks agree on that, and can go on to use their communicators
            raise comm_error("mismatch", f"fully_shard: ranks differ: {differs}")
    with together:
        for mesh in numbers:
            if mesh.secondary is not None:
                check_secondary(mesh)
        elsewhere = Elsewhere.of(model, found, meshes, main, inner)
        around = main.around({r: group for r, group in inner.items() if r not in elsewhere.within})
        experts = main.around({r: inner[r] for r in elsewhere.within if r in inner}).inner
        holders = {
            mesh: Holders(replace(mesh, inner=around.inner), around, experts, elsewhere.differs)
            for mesh in numbers
        }
        holders[main] = Holders(around, around, differs=elsewhere.differs)
        sharded = shard_units(
            found, policies, groups, [holders[mesh] for mesh in meshes], first_guess.slot_of
        )
    _check(sharded, planned)
    trained = _trained(sharded)

    @cache  # once
    def check() -> None:
        if _trained(sharded) == trained:  # else the plan was of another model
            _check(sharded, planned)

    engine = Engine(
        model,
        around,
        sharded,
        plan,
        order,
        check,
        on_nonfinite,
        strategy=strategy,
        owned=[
            group
            for mesh, policy in zip([main, *meshes], [rest, *policies], strict=True)
            for group in made_for(mesh, policy)
        ]
        + [*experts.values()],
        elsewhere=elsewhere,
    )
    optimizer_steps.install()
    remember(model)
    return engine


@contextmanager
def _told_to_all(main: Mesh, call: dict[str, str], together: FailingTogether) -> Iterator[None]:
    """What is raised in it, of this rank's model alone perhaps, is what the others hear of, who come to agree."""
    try:
        yield
    except Exception as error:
        with suppress(CommError), together:
            call[_ERROR] = repr(error)
            difference((main.shard, main.replicate), [Item("the call", call)])
        raise


def _items(
    model: nn.Module,
    units: Sequence[UnitParams],
    policies: Sequence[Policy],
    groups: Sequence[Sequence[BucketGroup]],
) -> Iterator[list[Item]]:
    """What the other ranks' collectives take for granted of this one's model, unit by unit."""
    names = {module: name for name, module in model.named_modules()}
    for unit, policy, unit_groups in zip(units, policies, groups, strict=True):
        items = [Item(f"unit {unit.name!r}", policy.facts())]
        for owned in unit.params:
            places = [f"{names[module]}.{attribute}" for module, attribute in owned.places]
            facts = {} if owned.distribution is None else owned.distribution.facts
            items.append(Item(f"parameter {owned.name!r}", {"places": repr(places), **facts}))
        for group in unit_groups:
            shared = {
                "dtype": str(group.dtype),
                "requires_grad": str(group.trainable),
                "param_dtype": str(group.param_dtype),
                "reduce_dtype": str(group.reduce_dtype),
            }
            items += layout_items(group.layout, shared)
        yield items


def _check(units: Sequence[ShardedUnit], plan: MemoryPlan) -> None:
    """RuntimeError if `units` hold other than planned, by a byte; of gradients, those of units that were reduced."""
    gradient_bytes = sum(
        planned.gradient_bytes
        for planned, unit in zip(plan.units, units, strict=True)
        if any(bucket.gradients.nbytes for bucket, _ in unit.buckets)
    )
    planned = asdict(replace(plan.footprint, gradient_bytes=gradient_bytes))
    held = asdict(measured(units))
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
