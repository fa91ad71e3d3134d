"""`reshard_after_forward`: units are gathered for backward inside hosts, from secondary shards. Two hosts of two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardcomm import (
    CommError,
    Communicator,
    MemoryPlan,
    Mesh,
    MixedPrecision,
    Policy,
    fully_shard,
    launch,
)
from shardcomm.engine.engine import Engine
from shardcomm.planner.unit_plan import UnitPlan
from support.nets import (
    STEPS,
    Block,
    Net,
    assert_same,
    batch,
    loss_of,
    make,
    optimizer_of,
    reference,
    sgd_of,
    train,
)
from support.rank_processes import heard, join, kill, processes
from support.thread_ranks import run_mesh, run_threads
from support.two_hosts import HOST, RANKS, on_two_hosts

HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gathers(comm: Communicator) -> int:
    """How many collectives of the gathers' channel there have been; of an all-gather, the latest."""
    return next((r.sequence for r in comm.receipts() if r.operation == "all_gather"), 0)


@pytest.mark.covers("reshard_after_forward", "training parity")
@pytest.mark.parametrize(
    "variant",
    [
        "",
        "tied",
        "frozen",
        "unused",
        "nested",
        "twice",
        "checkpoint",
        "checkpoint-reentrant",
        "skipped",
        "reversed",
    ],
)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_training_is_bitwise_that_of_one_process(variant: str, prefetch: int) -> None:
    def body(comm: Communicator, host: Communicator) -> dict[str, torch.Tensor]:
        model = make(variant)
        return train(comm, model, units=Block, reshard_after_forward=host, prefetch=prefetch)

    expected = reference(make(variant), RANKS)
    for state in on_two_hosts(body):
        assert_same(state, expected, bitwise=True)


@pytest.mark.covers("reshard_after_forward", "activation checkpointing")
def test_units_that_are_recomputed_together_train_bitwise_as_in_one_process() -> None:
    def body(comm: Communicator, host: Communicator) -> dict[str, torch.Tensor]:
        return train(comm, make("checkpoint-two"), reshard_after_forward=host)

    expected = reference(make("checkpoint-two"), RANKS)
    for state in on_two_hosts(body):
        assert_same(state, expected, bitwise=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "in bfloat16": {"mixed_precision": HALF},
    "offloaded": {"cpu_offload": True},
    "offloaded, in bfloat16": {"cpu_offload": True, "mixed_precision": HALF},
    "cut anywhere": {"granularity": "element"},
    "owned whole": {"granularity": "tensor"},
    "along any dim": {"shard_dim": "auto"},
    "in one slot": {"prefetch": 3, "slots": 1},
    "layers are units": {"units": [nn.Linear, nn.LayerNorm]},
}


@pytest.mark.covers("reshard_after_forward")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("variant", ["", "frozen"])
def test_what_else_is_asked_for_trains_as_without(options: str, variant: str) -> None:
    def body(comm: Communicator, host: Communicator | None) -> dict[str, torch.Tensor]:
        model = make(variant)
        return train(comm, model, reshard_after_forward=host, **OPTIONS[options])

    without = run_threads(partial(body, host=None), RANKS)
    for state, expected in zip(on_two_hosts(body), without, strict=True):
        for name, value in expected.items():
            assert torch.equal(state[name], value), name


@pytest.mark.covers("reshard_after_forward", "gradient accumulation")
def test_accumulation_is_bitwise_that_of_one_process() -> None:
    micro = 3

    def body(comm: Communicator, host: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        engine = fully_shard(model, comm, reshard_after_forward=host)
        optimizer = optimizer_of(model)
        for step in range(2):
            with engine.no_sync():
                for m in range(micro - 1):
                    loss_of(model, batch(comm.rank, step * micro + m)).backward()
            loss_of(model, batch(comm.rank, step * micro + micro - 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    expected = reference(make(), RANKS, 2, micro)
    for state in on_two_hosts(body):
        assert_same(state, expected, bitwise=True)


@pytest.mark.covers("reshard_after_forward")
def test_replicas_of_shards_train_as_in_one_process() -> None:
    """Two replicas, each over two hosts of two."""
    hosts = [Communicator.local_group(HOST) for _ in range(4)]

    def body(mesh: Mesh) -> dict[str, torch.Tensor]:
        host = hosts[mesh.rank // HOST][mesh.rank % HOST]
        given = {"strategy": "hybrid_shard", "reshard_after_forward": host}
        model = make("checkpoint")
        return train(mesh, model, optimizer_of=sgd_of, **given)

    expected = reference(make("checkpoint"), 2 * RANKS, optimizer_of=sgd_of)
    for state in run_mesh(body, 2, RANKS):
        assert_same(state, expected, bitwise=False)


# What travels where, and what it takes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["", "checkpoint", "checkpoint-reentrant"])
def test_backward_gathers_inside_hosts_alone(variant: str, dtype: torch.dtype) -> None:
    def body(comm: Communicator, host: Communicator) -> None:
        model = make(variant)
        half = MixedPrecision(param_dtype=dtype)
        engine = fully_shard(model, comm, reshard_after_forward=host, mixed_precision=half)
        loss_of(model, batch(comm.rank, 0)).backward()  # learns the order
        full = [bucket.full.nbytes for unit in engine.units for bucket, _ in unit.buckets]
        start, inside = engine.traffic.gathered_bytes, gathers(host)
        loss = loss_of(model, batch(comm.rank, 1))
        # Each unit once, a fourth of which is this rank's.
        forward = engine.traffic.gathered_bytes - start
        assert forward == sum(full) * 3 // 4
        assert gathers(host) == inside
        everywhere = gathers(comm)
        loss.backward()
        # The first two of four blocks, whose slots the others took; of each the other rank of the host has a half.
        assert gathers(comm) == everywhere
        assert gathers(host) - inside == 2
        assert engine.traffic.gathered_bytes - start - forward == 2 * full[1] // 2

    on_two_hosts(body)


class RoundAgain(Net):
    """Comes to its first block again after the others."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


def round_again() -> Net:
    model = make()
    model.__class__ = RoundAgain
    return model


def test_a_unit_that_a_forward_comes_to_again_is_gathered_inside_hosts_then() -> None:
    def body(comm: Communicator, host: Communicator) -> dict[str, torch.Tensor]:
        model = round_again()
        engine = fully_shard(model, comm, reshard_after_forward=host)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            inside = gathers(host)
            loss = loss_of(model, batch(comm.rank, step))
            assert step == 0 or gathers(host) - inside == 1  # the first learns the order
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    expected = reference(round_again(), RANKS)
    for state in on_two_hosts(body):
        assert_same(state, expected, bitwise=True)


def test_no_rank_gathers_into_memory_of_another() -> None:
    """A host may gather for backward while the other still computes."""

    def body(comm: Communicator, host: Communicator) -> set[int]:
        engine = fully_shard(make(), comm, reshard_after_forward=host)
        return {b.full.untyped_storage().data_ptr() for u in engine.units for b, _ in u.buckets}

    places = on_two_hosts(body)
    assert len(set.union(*places)) == sum(map(len, places))


def test_evaluation_keeps_no_secondary_shard() -> None:
    def body(comm: Communicator, host: Communicator) -> None:
        model = round_again()
        engine = fully_shard(model, comm, reshard_after_forward=host)
        loss_of(model, batch(comm.rank, 0)).backward()
        inside = gathers(host)
        with torch.no_grad():
            loss_of(model, batch(comm.rank, 0))
        assert gathers(host) == inside
        assert not any(
            unit.full.secondary and unit.full.secondary.is_current for unit in engine.units
        )

    on_two_hosts(body)


@pytest.mark.covers("reshard_after_forward", "memory as planned")
@pytest.mark.parametrize("options", OPTIONS)
def test_a_rank_takes_and_receives_what_was_planned(options: str) -> None:
    given = OPTIONS[options]

    def body(comm: Communicator, host: Communicator) -> None:
        model = make()
        plan = MemoryPlan.of(make(), RANKS, rank=comm.rank, reshard_after_forward=HOST, **given)
        engine = fully_shard(model, comm, reshard_after_forward=host, **given)
        for step in range(2):
            before = engine.traffic.gathered_bytes
            loss_of(model, batch(comm.rank, step)).backward()
            model.zero_grad()
        assert engine.traffic.gathered_bytes - before == plan.gathered_bytes
        assert engine.footprint() == plan.footprint
        kept = [unit for unit in plan.units if unit.secondary_bytes]
        assert plan.secondary_bytes >= sum(unit.full_bytes for unit in kept) / HOST
        without = MemoryPlan.of(make(), RANKS, rank=comm.rank, **given)
        assert plan.peak_bytes - without.peak_bytes == plan.secondary_bytes > 0

    on_two_hosts(body)


def test_a_secondary_shard_is_the_full_parameters_by_the_ranks_of_a_host() -> None:
    def cost(unit: UnitPlan) -> tuple[int, int, int, int]:
        return unit.full_bytes, unit.secondary_bytes, unit.gather_bytes, unit.regather_bytes

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    plan = MemoryPlan.of(model, 16, units=nn.Linear, reshard_after_forward=8)
    full = 64 * 64 * 4
    assert [cost(unit) for unit in plan.units[1:]] == [
        (full, full // 8, full * 15 // 16, full * 7 // 8)
    ] * 4
    assert plan.units[0].secondary_bytes == 0
    assert plan.gathered_bytes == 4 * (full * 15 // 16) + 2 * (full * 7 // 8)


# When a secondary shard is stale.


def gradients(engine: Engine, model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [
        grad.to_local().clone() if hasattr(grad, "to_local") else grad
        for grad in grads
        if grad is not None
    ]


def step_without_a_backward(engine: Engine, model: Net, rank: int) -> None:
    loss_of(model, batch(rank, 0))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    loss_of(model, batch(rank, 1)).backward()


def evaluate_between(engine: Engine, model: Net, rank: int) -> None:
    loss = loss_of(model, batch(rank, 1))
    with torch.no_grad():
        loss_of(model, batch(rank, 0))
    loss.backward()


def two_backwards_of_one_forward(engine: Engine, model: Net, rank: int) -> None:
    loss = loss_of(model, batch(rank, 1))
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards_of_one_backward(engine: Engine, model: Net, rank: int) -> None:
    first = loss_of(model, batch(rank, 0))
    (first + loss_of(model, batch(rank, 1))).backward()


def forward_that_fails(engine: Engine, model: Net, rank: int) -> None:
    hook = model.blocks[3].register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(rank, 0))
    hook.remove()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    loss_of(model, batch(rank, 1)).backward()


def _fail(module: nn.Module, args: object) -> None:
    raise ZeroDivisionError


def units_by_themselves(engine: Engine, model: Net, rank: int) -> None:
    loss_of(model, batch(rank, 0))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    x = torch.ones(2, 6)
    for block in model.blocks:
        x = block(x)
    x.sum().backward()
    loss_of(model, batch(rank, 1)).backward()


@pytest.mark.parametrize(
    "step",
    [
        step_without_a_backward,
        evaluate_between,
        two_backwards_of_one_forward,
        two_forwards_of_one_backward,
        forward_that_fails,
        units_by_themselves,
    ],
)
def test_what_is_between_forward_and_backward_is_seen_as_by_full_shard(
    step: Callable[[Engine, Net, int], None],
) -> None:
    def body(comm: Communicator, host: Communicator | None) -> list[torch.Tensor]:
        model = make()
        engine = fully_shard(model, comm, reshard_after_forward=host)
        loss_of(model, batch(comm.rank, 2)).backward()
        model.zero_grad()
        step(engine, model, comm.rank)
        return gradients(engine, model)

    without = run_threads(partial(body, host=None), RANKS)
    for ours, theirs in zip(on_two_hosts(body), without, strict=True):
        assert all(map(torch.equal, ours, theirs))


def load(engine: Engine, model: Net) -> None:
    engine.load_state_dict(make(seed=1).state_dict())


def change(engine: Engine, model: Net) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def change_after_a_backward(engine: Engine, model: Net) -> None:
    loss_of(model, batch(0, 1)).backward()
    change(engine, model)


@pytest.mark.covers("changed parameters")
@pytest.mark.parametrize("change", [load, change, change_after_a_backward])
def test_a_backward_raises_of_parameters_that_were_changed_after_their_forward(
    change: Callable[[Engine, Net], None],
) -> None:
    """As without sharding, though secondary shards may have the values from before."""

    def body(comm: Communicator, host: Communicator) -> None:
        model = make()
        engine = fully_shard(model, comm, reshard_after_forward=host)
        loss = loss_of(model, batch(comm.rank, 1))
        change(engine, model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_two_hosts(body)


@pytest.mark.parametrize("variant", ["checkpoint", "checkpoint-reentrant"])
def test_what_is_computed_again_is_of_the_parameters_of_now(variant: str) -> None:
    def body(comm: Communicator, host: Communicator) -> None:
        model, plain = make(variant), make(variant)
        fully_shard(model, comm, units=Block, reshard_after_forward=host)
        for net in (model, plain):
            loss = loss_of(net, batch(0, 0))
            with torch.no_grad():
                for param in net.blocks.parameters():
                    param.mul_(0.5)
            loss.backward()
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, msg=name)

    on_two_hosts(body)


# Policies.


@pytest.mark.covers("reshard_after_forward", "units that differ")
def test_a_policy_says_whose_units_are_gathered_inside_hosts() -> None:
    def body(comm: Communicator, host: Communicator) -> dict[str, torch.Tensor]:
        model = make("nested")
        units = {Block: Policy(reshard_after_forward=host), nn.Linear: None}
        plan = MemoryPlan.of(make("nested"), RANKS, units=units, rank=comm.rank)
        engine = fully_shard(model, comm, units=units)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            before = engine.traffic.gathered_bytes
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {type(u.module) for u in engine.units if u.full.secondary is not None} == {Block}
        assert engine.footprint() == plan.footprint
        assert engine.traffic.gathered_bytes - before == plan.gathered_bytes
        return engine.full_state_dict()

    expected = reference(make("nested"), RANKS)
    for state in on_two_hosts(body):
        assert_same(state, expected, bitwise=True)


def test_units_with_another_strategy_or_other_ranks_are_gathered_as_these_say() -> None:
    def body(comm: Communicator, host: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        units = {
            model.blocks[0]: Policy(strategy="no_shard"),
            model.blocks[1]: Policy(strategy="shard_grad_op"),
            Block: None,
        }
        engine = fully_shard(model, comm, units=units, reshard_after_forward=host, prefetch=0)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [u.full.secondary is not None for u in engine.units] == [False] * 3 + [True] * 2
        return engine.full_state_dict()

    expected = reference(make(), RANKS)
    for state in on_two_hosts(body):
        assert_same(state, expected, bitwise=False)


@pytest.mark.covers("reshard_after_forward", "expert meshes")
def test_experts_are_gathered_among_their_own_ranks() -> None:
    """Hosts 0 and 1 have other experts: the blocks of each host are sharded in it, and the rest over all."""

    def body(comm: Communicator, host: Communicator) -> list[bool]:
        model = make()
        units = {Block: Policy(comm=host), model.head: None, model.embed: None}
        engine = fully_shard(model, comm, units=units, reshard_after_forward=host, prefetch=0)
        loss_of(model, batch(comm.rank, 0)).backward()
        return [unit.full.secondary is not None for unit in engine.units]

    for kept in on_two_hosts(body):
        assert kept == [False, True, *[False] * 4, True]  # embedding and head share a slot


@pytest.mark.covers("reshard_after_forward", "failed ranks")
def test_a_rank_whose_other_groups_fail_lets_its_host_know() -> None:
    set_up = threading.Barrier(RANKS)

    def body(comm: Communicator, host: Communicator) -> None:
        engine = fully_shard(make(), comm, reshard_after_forward=host)
        set_up.wait(60)
        if host.rank == 0:
            engine.mesh.abort("it failed elsewhere")
        else:
            with pytest.raises(CommError, match="it failed elsewhere"):
                host.barrier()

    on_two_hosts(body)


# Processes.


def train_on_processes() -> None:
    """Over communicators, and over a mesh and a number: as without; and inside of hosts windows are read."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with (
        Communicator.from_process_group() as comm,
        Communicator.from_process_group(transport="c10d") as slow,
        Communicator.from_process_group(groups[rank // HOST]) as host,
        Communicator.from_process_group(groups[rank // HOST], transport="c10d") as slow_host,
    ):
        expected = train(comm, make("checkpoint"))
        given_to = [(comm, host), (comm, slow_host), (slow, host), (mesh, HOST), (mesh, host)]
        for ranks, given in given_to:
            model = make("checkpoint")
            engine = fully_shard(model, ranks, reshard_after_forward=given)
            optimizer = optimizer_of(model)
            for step in range(4):
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            state = engine.full_state_dict()
            for name, value in expected.items():
                if ranks is slow:  # which sums in another order
                    torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)
                else:
                    assert torch.equal(state[name], value), name
            engine.close()
        host.barrier()  # an engine leaves the groups that it made, and no other
        taken = {r.operation: r.taken for r in host.receipts()}
        assert taken["all_gather"] == "inline", taken
    dist.new_group([0])  # after which torch would name a group differently on ranks of a run
    fully_shard(make("checkpoint"), mesh, reshard_after_forward=HOST).close()
    dist.destroy_process_group()


@pytest.mark.covers("reshard_after_forward")
def test_processes_train_bitwise_as_without() -> None:
    launch(train_on_processes, RANKS, timeout_s=120)


def train_over_two_dims() -> None:
    """With tensor parallel inside, and with replicas."""
    dist.init_process_group("gloo")

    def trained(ranks: DeviceMesh, tp: DeviceMesh | None, **given: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        for block in blocks if tp is not None else ():
            parallelize_module(block, tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        engine = fully_shard(model, ranks, units=blocks, **given)
        optimizer = optimizer_of(model)
        for step in range(2):
            torch.manual_seed(10 * step + engine.mesh.rank)
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: param.full_tensor() for name, param in model.named_parameters()}
        engine.close()
        return state

    mesh = dist.init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    replicas = dist.init_device_mesh("cpu", (2, 4))
    for ranks, tp, strategy in [
        (mesh["dp"], mesh["tp"], "full_shard"),
        (replicas, None, "hybrid_shard"),
    ]:
        expected = trained(ranks, tp, strategy=strategy)
        state = trained(ranks, tp, strategy=strategy, reshard_after_forward=2)
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
    dist.new_group([0])  # of the first row
    state = trained(replicas, None, strategy="hybrid_shard", reshard_after_forward=2)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    dist.destroy_process_group()


@pytest.mark.covers("reshard_after_forward")
def test_meshes_of_two_dims_train_bitwise_as_without() -> None:
    launch(train_over_two_dims, 8, timeout_s=180)


def train_until_a_rank_dies(rank: int, tell: Any, ranks: int, address: str, meeting: str) -> None:
    comm = join(rank, ranks, address, meeting)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    host = Communicator.from_process_group(groups[rank // HOST])
    model = make()
    fully_shard(model, comm, reshard_after_forward=host)
    try:
        for step in range(10**6):
            loss_of(model, batch(rank, step)).backward()
            model.zero_grad()
            if step == 1:
                tell.send("it trains")
    except CommError as error:
        tell.send(str(error))


@pytest.mark.covers("reshard_after_forward", "failed ranks")
def test_a_rank_that_dies_is_heard_of_on_the_other_host_too(tmp_path: Path) -> None:
    with processes(train_until_a_rank_dies, RANKS, tmp_path / "meeting") as (started, ears):
        for ear in ears:
            assert heard(ear) == "it trains"
        kill(started[3])
        for ear in ears[:3]:
            assert "rank 3" in heard(ear)
