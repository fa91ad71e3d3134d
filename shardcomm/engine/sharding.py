"""`fully_shard`: the one call that turns a model into a sharded one, with the engine that trains it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcomm.arguments.checks import said_by
from shardcomm.checkpoint.elsewhere import Elsewhere
from shardcomm.comm.agreement import Item
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import FailingTogether, Mesh
from shardcomm.engine.call import Call, items_of
from shardcomm.engine.engine import Engine
from shardcomm.engine.fsdp2_names import told_arguments
from shardcomm.engine.gradients import OnNonfinite
from shardcomm.engine.meshes import check_crossing, check_secondary, made_for, mesh_of, meshes_of
from shardcomm.engine.model_checks import check_devices, check_modules, check_separate_memory
from shardcomm.engine.shard_units import shard_units
from shardcomm.engine.sharded_modules import check_not_spread, is_sharded, remember
from shardcomm.parameter import backward_inputs, collectives, optimizer_steps
from shardcomm.parameter.holders import Holders
from shardcomm.parameter.replaced import take_over
from shardcomm.parameter.tensor_parallel import inner_groups
from shardcomm.planner.planner import MemoryPlan
from shardcomm.planner.policies import may_be_left_out, policies_of, schedule_units
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.strategy import Strategy
from shardcomm.schedule.triggers import Trigger
from shardcomm.sharded.measured import measured
from shardcomm.sharded.sharded_unit import ShardedUnit
from shardcomm.unit.grouped_unit import by_pool
from shardcomm.unit.groups import GranularityOf, ShardDimOf, group_units
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.owners import OwnerCost
from shardcomm.unit.policy import Policy
from shardcomm.unit.pool import Pool
from shardcomm.unit.unit import UnitParams, Units, find_units, registration_order

_KINDS = (
    "kinds of units, by comm and strategy, of which every rank needs as many (to one without the experts that others "
    "have, give a unit with Policy(comm=Communicator.local_group(1)[0])):"
)


@said_by("fully_shard")
@told_arguments
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
    """Shards a model's parameters, gradients and optimizer state over ranks, and returns the engine that drives it.

    Afterwards `model.parameters()` are this rank's rows of each parameter. Make the optimizer from them; an optimizer
    that was made before is refused at its first step. Forward, backward and the optimizer's step are written as without
    sharding. An operation that would be wrong of rows alone is refused, or answered for the whole parameter
    ([`ShardedParameter`][shardcomm.ShardedParameter]). All ranks start from rank 0's values. A model on the meta device
    is materialised unit by unit, by its modules' `reset_parameters`.

    Collective: every rank calls `fully_shard` with the same model and the same arguments.

    Args:
        model: The model. It is changed in place, and its buffers move to the device of `comm`. If you compile its
            blocks (`block.compile()`), do so before. Parameters that are DTensors, as `parallelize_module` makes them,
            are sharded by their local tensors; `comm` then has the ranks that hold the same part of them. All other
            parameters must be used alike on all ranks of the DTensors' meshes.
        comm: The ranks: a Communicator or a torch DeviceMesh of one dimension. For "hybrid_shard", a
            [`Mesh`][shardcomm.Mesh], or a DeviceMesh of two dimensions, whose first replicates and whose second shards
            (as in PyTorch FSDP2).
        units: The modules whose parameters are gathered together: modules, module classes, or None. None takes the
            entries of every `nn.ModuleList` that have a forward and are not inside such an entry. Parameters outside
            of these units belong to the model itself, which is gathered from a step's start to its end. A mapping
            gives each unit a [`Policy`][shardcomm.Policy], by which it differs from the rest, or None. The model
            itself may be a key.
        ignored_params: Parameters of the model that stay as they are: not moved, not made equal on all ranks, and not
            sharded. Their gradients are this rank's own. Torch's `clip_grad_norm_` counts the mean of their norms'
            powers over the ranks; `Engine.clip_grad_norm_` neither counts nor scales them.
        strategy: "full_shard" (ZeRO-3), "shard_grad_op" (ZeRO-2), "hybrid_shard" (ZeRO-3 in groups of ranks, data
            parallel between the groups) or "no_shard" (data parallel).
        mixed_precision: The dtypes to compute and to communicate in. Shards keep the parameters' own dtypes.
        prefetch: How many units ahead are gathered while one computes, in forward.
        backward_prefetch: The same in backward. None: as `prefetch`.
        slots: How many full-size buffers are shared by the units that are equally deep inside others, where the
            strategy reshards after forward. Other units, and the model itself, have one each. None: one more than the
            larger prefetch depth.
        granularity: The smallest piece of a parameter that stays on one rank: "element", "row", `RowBlock(rows)` or
            "tensor"; one for all parameters, or a function of a parameter's name and the parameter. With "tensor" one
            rank owns the parameter, its gradient and its optimizer state, and the other ranks have none of it. Owners
            are chosen over the whole model, so that each rank holds about as many bytes
            ([`MemoryPlan`][shardcomm.MemoryPlan] tells how evenly); a unit's shards then differ in length. In a unit
            with both kinds, the parameters that are cut are gathered and reduced apart from those that are not.
        shard_dim: The dim whose indices are the rows that ranks share out, given as `granularity` is; -1 is the last.
            "auto" takes the dims that make the least padding. A rank's rows are a slice along this dim, in the
            parameter's own order of dims. The full parameter is a strided view, which some of PyTorch's kernels read
            more slowly.
        owner_cost: With granularity "tensor", what it costs to own a parameter, as a function of its name and the
            parameter. None: its bytes. For Muon it may be the work on a matrix. Ranks get about equal sums.
        cpu_offload: Whether shards, gradients and, through them, the optimizer's state are kept in host memory. The
            parameters that the optimizer updates are CPU tensors then. A gather first copies a shard to the device,
            and a reduce copies the gradient back, beside computation. The host memory is pinned, in blocks which torch
            rounds up to a power of two. As PyTorch FSDP2's `CPUOffloadPolicy()`. Ranks on a CPU gain nothing by it,
            but do the same.
        reshard_after_forward: With "full_shard" and "hybrid_shard", the ranks that gather a unit for backward among
            themselves, such as those of this rank's host: a Communicator of some of the ranks that hold a model
            between them, whose number divides theirs. Other ranks give their own. With a DeviceMesh the number of
            ranks will do, as in PyTorch FSDP2. Each of these ranks keeps its part of what forward gathered, which is
            the hpZ of ZeRO++. Values are the same bit for bit. It is for several hosts: on one host it takes memory
            and gains nothing.
        on_nonfinite: What a backward does, on every rank, when a gradient is NaN or Inf after its reduce. "raise"
            raises a FloatingPointError that names the parameters. "skip" leaves no parameter a `.grad`, so that the
            optimizer's step passes over all, and `engine.nonfinite` names the units. The kernels that write gradients
            look for NaN and Inf on the way, at little cost (see
            [`Communicator.reduce_scatter`][shardcomm.Communicator.reduce_scatter]); on a GPU, the host waits for the
            result. With either, no `.grad` is shown before backward has ended. Leave it None with a
            [`GradScaler`][shardcomm.GradScaler], which looks for itself.

    Returns:
        The engine, which has what a training loop calls besides the model: clipping, accumulation, state dicts.

    Raises:
        TypeError: An argument is not of a type that is accepted, is not known, or is missing; the message names it.
        ValueError: An argument is out of its range, the model is sharded already, or the model has something that
            cannot be sharded. The message names it. Or a module has no values after its `reset_parameters`; the ranks'
            groups have ended then.
        CommError: A rank is missing, has raised, has called with another model, or has other parts of DTensors.

    Example:
        ```python
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
        engine = shardcomm.fully_shard(model, comm, units=[torch.nn.Linear])
        optimizer = torch.optim.AdamW(model.parameters())  # after fully_shard: of this rank's rows

        for _ in range(3):
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        ```

    References:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.
        Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", arXiv 2304.11277.
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv 2306.10209.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; it must be the whole model, a torch.nn.Module; units= names parts"
        )
    if on_nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"on_nonfinite is {on_nonfinite!r}; accepted: 'raise', 'skip', None")
    if any(map(is_sharded, model.modules())):
        raise ValueError(
            "model, or a module of it, is sharded already; call fully_shard once, with the whole model, "
            "and name the modules to gather one by one in units="
        )
    check_not_spread(model)
    rest = Policy(
        comm,
        Strategy.named(strategy).name,
        MixedPrecision() if mixed_precision is None else mixed_precision,
        prefetch,
        prefetch if backward_prefetch is None else backward_prefetch,
        cpu_offload,
        reshard_after_forward,
    )
    main = mesh_of(rest)
    check_crossing("comm", _given_meshes([rest]))
    call = Call(main, {**rest.facts(), "slots": repr(slots), "on_nonfinite": repr(on_nonfinite)})
    with call.told_to_all():
        found = find_units(model, units, ignored_params)
        _take_over(found)
        order = registration_order(found)
        policies = policies_of(found, rest)
        call.facts[_KINDS] = repr(len({policy.ranks for policy in [rest, *policies]}))
    call.agree(main)
    with call.told_to_all():
        meshes = meshes_of(policies, rest, main)
    pool_of = {mesh: Pool.of(mesh, i) for i, mesh in enumerate(dict.fromkeys([main, *meshes]))}
    call.together = FailingTogether([*pool_of])
    with call.told_to_all():
        check_modules(model, main.device)
        check_devices(found, main.device)
        inner = inner_groups(owned.distribution for unit in found for owned in unit.params)
        pools = [pool_of[mesh] for mesh in meshes]
        grouped = group_units(found, policies, pools, granularity, shard_dim, owner_cost)
        first_guess = schedule_units(order, grouped, rest, slots=slots)
        check_separate_memory(found)
        planned = MemoryPlan.of_units(grouped, rest, first_guess, main.size)
        items = {pool: list(items_of(model, its)) for pool, its in by_pool(grouped).items()}

    def plan(order: Sequence[Trigger], backward: bool) -> Schedule:
        return schedule_units(order, grouped, rest, slots=first_guess.slot_of, backward=backward)

    described = {mesh: items.get(pool, []) for mesh, pool in pool_of.items()}
    _agree(call, main, _given_meshes(policies, comm), described)
    with call.together:
        for mesh in pool_of:
            if mesh.secondary is not None:
                check_secondary(mesh)
        elsewhere = Elsewhere.of(model, found, meshes, main, inner)
        # All ranks: `main`, and the groups of the DTensors' meshes. Groups of expert meshes are apart from these, since
        # their ranks are ranks of `main` already, and hold other experts.
        around = main.around({r: group for r, group in inner.items() if r not in elsewhere.within})
        experts = main.around({r: inner[r] for r in elsewhere.within if r in inner}).inner
        holders = {
            pool: Holders(replace(mesh, inner=around.inner), around, experts, elsewhere.differs)
            for mesh, pool in pool_of.items()
        }
        holders[pool_of[main]] = Holders(around, around, differs=elsewhere.differs)
    with call.ended_by_errors(pool_of):
        sharded = shard_units(grouped, holders, first_guess.slot_of)
    engine = Engine(
        model,
        around,
        sharded,
        plan,
        order,
        _held_as_planned(sharded, planned),
        on_nonfinite,
        strategy=strategy,
        may_be_left_out=[sharded[unit] for unit in may_be_left_out(grouped, rest)],
        owned=[
            group
            for mesh, policy in zip([main, *meshes], [rest, *policies], strict=True)
            for group in made_for(mesh, policy)
        ]
        + [*experts.values()],
        elsewhere=elsewhere,
    )
    _guard(model, sharded, elsewhere)
    return engine


def _given_meshes(policies: Iterable[Policy], beside: object = None) -> list[Mesh]:
    """The meshes that `policies` are given as their `comm`, without `beside`."""
    given = dict.fromkeys(p.comm for p in policies if isinstance(p.comm, Mesh))
    return [mesh for mesh in given if mesh != beside]


def _agree(
    call: Call, main: Mesh, given: Sequence[Mesh], described: Mapping[Mesh, list[Item]]
) -> None:
    """Compares the calls of all ranks, and what is `described` for each mesh; checks meshes `given` in policies."""
    call.agree(main, described[main])  # first: here each rank hears of others that have raised
    if len(described) > 1:
        with call.told_to_all():
            check_crossing("a policy's comm", given)
        call.agree(main)
    for mesh, items in described.items():
        if mesh != main:
            call.agree(mesh, items)


def _take_over(units: Sequence[UnitParams]) -> None:
    """Lets the engine read gradients of parameters that another engine has replaced, which the model still has."""
    for unit in units:
        for owned in unit.params:
            take_over(owned.param)


def _guard(model: nn.Module, units: Sequence[ShardedUnit], elsewhere: Elsewhere) -> None:
    """Lets optimizers and modules know that `model` is sharded, and that parameters in no unit are each rank's own.

    Warns where ranks call different parameters by one name, as by a policy's comm that leaves ranks out by mistake.
    """
    if elsewhere.ambiguous:
        warnings.warn(
            f"fully_shard: by a policy's comm, {elsewhere.ambiguity}, which are trained apart as experts are; give "
            "experts the numbers they have in the whole model, and leave a unit that is the same on all ranks to "
            "fully_shard's comm, or to strategy='hybrid_shard'",
            stacklevel=5,
        )
    optimizer_steps.install()
    backward_inputs.install()
    collectives.install()
    remember(model)
    held = {param.shard for unit in units for param in unit.params}
    for param in model.parameters():
        if param not in held:
            optimizer_steps.left_to_each_rank(param)


def _held_as_planned(units: Sequence[ShardedUnit], plan: MemoryPlan) -> Callable[[], None]:
    """Checks that `units` hold what `plan` says, and returns the check for when their first gradients are there."""
    _check(units, plan)
    trained = _trained(units)

    @cache  # so that it checks once
    def check() -> None:
        if _trained(units) == trained:  # else the plan was made for other trainable parameters
            _check(units, plan)

    return check


def _check(units: Sequence[ShardedUnit], plan: MemoryPlan) -> None:
    """Raises RuntimeError if `units` hold one byte more or less than `plan` says.

    Gradients are compared for the units that have been reduced; the others have none yet.
    """
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
