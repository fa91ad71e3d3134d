"""Shards in host memory: training is the same, bit for bit, as with shards on the device.

Without a GPU the device's memory is the host's, too; what reaches the communicator then tells the two apart.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import CPUOffload, OffloadPolicy

from shardcomm import (
    AdamW,
    Bucket,
    Communicator,
    GradScaler,
    Layout,
    MemoryPlan,
    Mesh,
    MixedPrecision,
    ParamSpec,
    fully_shard,
)
from shardcomm.bucket.offload import Offload
from shardcomm.stream.streams import Streams, TorchStream, copy
from support.accumulation import train
from support.nets import Net, batch, loss_of, make, sgd_of
from support.thread_ranks import run_mesh, run_threads
from support.twins import local

# Precision, and how two batches are accumulated; see `train`.
STEPS_OF_ALL_KINDS = [(False, ""), (False, "every"), (True, "no_sync"), (True, "every")]
CPU = torch.device("cpu")


def assert_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


@pytest.mark.covers("CPU offload", "gradient accumulation", "mixed precision")
@pytest.mark.parametrize(
    ("strategy", "replicas", "shards"),
    [
        ("full_shard", 1, 1),
        ("full_shard", 1, 3),
        ("shard_grad_op", 1, 2),
        ("no_shard", 1, 1),
        ("no_shard", 1, 2),
        ("hybrid_shard", 2, 2),
    ],
)
def test_training_is_bitwise_that_without_offload(
    strategy: str, replicas: int, shards: int
) -> None:
    def body(mesh: Mesh) -> None:
        ranks = mesh if strategy == "hybrid_shard" else mesh.shard
        for half, accumulation in STEPS_OF_ALL_KINDS:
            offloaded, plain = (
                train(ranks, strategy, half, accumulation, cpu_offload=cpu_offload)
                for cpu_offload in (True, False)
            )
            assert_equal(offloaded, plain)

    run_mesh(body, replicas, shards)


@pytest.mark.covers("CPU offload")
@pytest.mark.parametrize(
    "variant", ["frozen", "tied-across-units", "unused", "twice", "reversed", "checkpoint"]
)
def test_any_model_trains_the_same(variant: str) -> None:
    def trained(comm: Communicator, *, cpu_offload: bool) -> dict[str, Any]:
        model = make(variant)
        engine = fully_shard(model, comm, prefetch=2, on_nonfinite="raise", cpu_offload=cpu_offload)
        optimizer = AdamW(model.parameters(), lr=0.05)
        scaler = GradScaler(engine, init_scale=4.0)
        norms = []
        for step in range(3):
            with torch.no_grad():
                loss_of(model, batch(comm.rank, step))
            scaler.scale(loss_of(model, batch(comm.rank, step))).backward()
            scaler.unscale_(optimizer)
            norms.append(engine.clip_grad_norm_(0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {"norms": torch.stack(norms), **engine.full_state_dict()}

    def body(comm: Communicator) -> None:
        assert_equal(trained(comm, cpu_offload=True), trained(comm, cpu_offload=False))

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard"])
def test_host_memory_is_not_communicated(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only copies reach it: on a GPU, collectives could not."""
    communicated: list[torch.Tensor] = []
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        of_kind = type(Communicator.local_group(1)[0])
        before = getattr(of_kind, name)

        def recorded(self: Any, *args: Any, before: Any = before, **options: Any) -> Any:
            communicated.extend(arg for arg in args if isinstance(arg, torch.Tensor))
            return before(self, *args, **options)

        monkeypatch.setattr(of_kind, name, recorded)

    def body(mesh: Mesh) -> set[int]:
        ranks = mesh if strategy == "hybrid_shard" else mesh.replicate
        model = make()
        engine = fully_shard(model, ranks, strategy=strategy, cpu_offload=True)
        for step in range(2):
            loss_of(model, batch(mesh.rank, step)).backward()
        engine.clip_grad_norm_(1.0)
        engine.full_state_dict()
        params = list(model.parameters())
        assert all(param.grad is not None and param.grad.device == CPU for param in params)
        return {
            local(part).untyped_storage().data_ptr()
            for param in params
            for part in (param, param.grad)
            if part is not None and part.numel()
        }

    hosts = set().union(*run_mesh(body, 2, 2 if strategy == "hybrid_shard" else 1))
    assert communicated
    assert not hosts & {tensor.untyped_storage().data_ptr() for tensor in communicated}


def test_the_host_waits_for_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream that lags behind, as a GPU's does."""
    go_on = threading.Event()

    def lagging(to: torch.Tensor, source: torch.Tensor, stream: Any) -> Any:
        if to is bucket.grad:
            stream.enqueue(lambda: go_on.wait(30))
        return copy(to, source, stream)

    monkeypatch.setattr("shardcomm.bucket.offload.copy", lagging)
    comm = Communicator.local_group(1)[0]
    streams = Streams(CPU)
    layout = Layout.plan([ParamSpec("w", (4, 2))], 1)
    offload = Offload(CPU, 4 * layout.shard_numel)
    bucket = Bucket(layout, comm, offload=offload, streams=streams)
    weight = torch.arange(8.0).view(4, 2)
    bucket.load([weight])
    for times in (1, 2):  # the second reduce is added to the first
        go_on.clear()
        gathered = bucket.all_gather(async_op=True)
        reduced = bucket.reduce_scatter([torch.full((4, 2), 3.0)], async_op=True)
        assert offload.landed is not None
        assert not offload.landed.query()
        go_on.set()
        gathered.wait()
        assert torch.equal(bucket.params[0], weight)
        reduced.wait()
        assert bucket.shards[0].grad is not None
        assert bucket.shards[0].grad.eq(times * 3.0).all()


def test_a_forward_alone_leaves_no_shard_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user may write the shards next: the host has waited for each copy before it returned."""
    copied: list[Any] = []
    fetch = Offload.fetch

    def recorded(self: Offload, *args: Any) -> None:
        fetch(self, *args)
        copied.append(self._fetched)

    monkeypatch.setattr(Offload, "fetch", recorded)
    model = make()
    fully_shard(model, Communicator.local_group(1)[0], prefetch=9, cpu_offload=True)
    for forward in (model, model.blocks[1]):
        copied.clear()
        forward(torch.zeros(2, 3, dtype=torch.long) if forward is model else torch.ones(2, 6))
        assert copied
        assert all(event.query() for event in copied)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saved_offloaded", [True, False])
def test_checkpoints_know_nothing_of_offload(saved_offloaded: bool, tmp_path: Path) -> None:
    def run(step: int, model: Net, *, cpu_offload: bool) -> tuple[Any, Any]:
        comm = Communicator.local_group(1)[0]
        engine = fully_shard(model, comm, cpu_offload=cpu_offload)
        optimizer = AdamW(model.parameters(), lr=0.05)
        state = {"model": engine, "optimizer": engine.optimizer_state(optimizer)}
        if step:
            dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        loss_of(model, batch(0, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        return engine, optimizer

    def two_steps() -> dict[str, Any]:
        model = make()
        engine = fully_shard(model, Communicator.local_group(1)[0])
        optimizer = AdamW(model.parameters(), lr=0.05)
        for step in range(2):
            loss_of(model, batch(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    run(0, make(), cpu_offload=saved_offloaded)
    engine, _ = run(1, make(seed=1), cpu_offload=not saved_offloaded)
    assert_equal(engine.full_state_dict(), two_steps())


@pytest.mark.covers("CPU offload", "frozen and tied parameters")
@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_parameters_may_be_thawed(ranks: int) -> None:
    """Also where they are larger than all whose gradients there were before."""

    def trained(comm: Communicator, *, cpu_offload: bool) -> dict[str, Any]:
        model = make()
        for name, param in model.named_parameters():
            param.requires_grad = name == "head.weight"
        engine = fully_shard(model, comm, cpu_offload=cpu_offload)
        optimizer = sgd_of(model)
        for step in range(4):
            loss_of(model, batch(comm.rank, step)).backward()
            if step % 2:  # a gradient is added to, too
                optimizer.step()
                optimizer.zero_grad()
                model.requires_grad_(True)
        return engine.full_state_dict()

    def body(comm: Communicator) -> None:
        assert_equal(trained(comm, cpu_offload=True), trained(comm, cpu_offload=False))

    run_threads(body, ranks)


@pytest.mark.covers("CPU offload", "state dicts")
def test_full_tensors_are_loaded_into_host_memory() -> None:
    def body(comm: Communicator) -> None:
        model, other = make(), make(seed=1)
        engine = fully_shard(model, comm, cpu_offload=True)
        loss_of(model, batch(comm.rank, 0)).backward()
        engine.load_state_dict(other.state_dict())
        assert_equal(engine.full_state_dict(), other.state_dict())

    run_threads(body, 2)


def test_plan_by_hand() -> None:
    """3 units of 1,024 elements over 4 ranks, gathered in bfloat16."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    half = MixedPrecision(torch.bfloat16)
    plan, resident = (
        MemoryPlan.of(model, 4, units=nn.Linear, mixed_precision=half, cpu_offload=cpu_offload)
        for cpu_offload in (True, False)
    )
    shard = 4 * 1024 // 4
    assert plan.host_bytes == plan.state_bytes == 4 * 3 * shard
    assert plan.offload_bytes == 2 * shard
    assert plan.peak_bytes == resident.peak_bytes - plan.host_bytes + plan.offload_bytes
    assert plan.peak_resident_bytes == resident.peak_resident_bytes + plan.offload_bytes
    assert plan.gathered_bytes == resident.gathered_bytes
    assert resident.host_bytes == resident.offload_bytes == 0


@pytest.mark.parametrize("given", [CPUOffload(offload_params=False), OffloadPolicy(), "no", None])
def test_what_is_no_bool_turns_nothing_on(given: Any) -> None:
    model = make()
    message = r"cpu_offload is .*; it must be True, as FSDP2's CPUOffloadPolicy\(\) is, or False"
    with pytest.raises(TypeError, match=message):
        MemoryPlan.of(model, 2, cpu_offload=given)
    comm = Communicator.local_group(1)[0]
    with pytest.raises(TypeError, match=message):
        fully_shard(model, comm, cpu_offload=given)
    fully_shard(model, comm)  # the model is as it was


def test_plan_of_one_rank_has_slots_which_it_needs_only_with_offload() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    plan = MemoryPlan.of(model, 1, units=nn.Linear, cpu_offload=True)
    unit = 4 * 1024
    assert plan.slot_bytes == (unit, unit, 0)
    assert plan.peak_bytes == 2 * unit + 2 * unit + plan.full_gradient_bytes
    assert MemoryPlan.of(model, 1, units=nn.Linear).slot_bytes == (0, 0, 0)


def test_sgd_and_adamw_step_in_host_memory() -> None:
    model = make()
    fully_shard(model, Communicator.local_group(1)[0], cpu_offload=True)
    for optimizer in (sgd_of(model), AdamW(model.parameters())):
        loss_of(model, batch(0, 0)).backward()
        optimizer.step()
        state = [s for entry in optimizer.state.values() for s in entry.values()]
        assert state
        assert all(value.device == CPU for value in state if value is not None)


@pytest.mark.gpu
def test_shards_and_gradients_are_pinned_and_full_parameters_on_the_gpu() -> None:
    def body(comm: Communicator) -> None:
        model = make(width=64)
        fully_shard(model, comm, cpu_offload=True)
        computed_on: list[str] = []
        model.blocks[0].up.register_forward_pre_hook(
            lambda module, _: computed_on.append(module.weight.device.type)
        )
        loss_of(model, batch(comm.rank, 0).to(comm.device)).backward()
        assert computed_on == ["cuda"]
        for param in model.parameters():
            for part in (param, param.grad):
                assert part is not None
                assert part.device == CPU
                assert part.is_pinned() or not part.numel()

    run_threads(body, 2, device="cuda")


@pytest.mark.covers("CPU offload")
@pytest.mark.gpu
@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_gradients_of_a_gpu_are_bitwise_those_without_offload(replicas: int, shards: int) -> None:
    def gradients(mesh: Mesh, *, cpu_offload: bool) -> dict[str, Any]:
        model = make(width=64)
        fully_shard(
            model,
            mesh,
            strategy="hybrid_shard",
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
            cpu_offload=cpu_offload,
        )
        for step in range(3):  # the later ones are added
            loss_of(model, batch(mesh.rank, step).to(mesh.device)).backward()
        return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}

    def body(mesh: Mesh) -> None:
        assert_equal(gradients(mesh, cpu_offload=True), gradients(mesh, cpu_offload=False))

    run_mesh(body, replicas, shards, device="cuda")


@pytest.mark.covers("CPU offload")
@pytest.mark.gpu
def test_training_on_a_gpu_is_that_without_offload_within_rounding() -> None:
    """The optimizer's arithmetic is the CPU's."""

    def trained(comm: Communicator, *, cpu_offload: bool) -> dict[str, Any]:
        model = make(width=64)
        engine = fully_shard(model, comm, cpu_offload=cpu_offload)
        optimizer = sgd_of(model)
        scaler = GradScaler(engine, init_scale=4.0)
        for step in range(4):
            loss = loss_of(model, batch(comm.rank, step).to(comm.device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            engine.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return engine.full_state_dict()

    def body(comm: Communicator) -> None:
        wanted = trained(comm, cpu_offload=False)
        for name, value in trained(comm, cpu_offload=True).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4, msg=name)

    run_threads(body, 2, device="cuda")


@pytest.mark.gpu
def test_a_gpu_copies_while_it_computes() -> None:
    comm = Communicator.local_group(1, device="cuda")[0]
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(6)))
    engine = fully_shard(model, comm, units=nn.Linear, cpu_offload=True)
    x = torch.randn(8192, 2048, device=comm.device)
    for _ in range(3):
        model(x).sum().backward()
    with engine.trace() as trace:
        model(x).sum().backward()
    spans = trace.spans()
    computed = [span for span in spans if span.row == "compute"]
    for row in ("gather", "reduce"):
        copied = [span for span in spans if span.row == row]
        assert any(
            max(a.begin_s, b.begin_s) < min(a.end_s, b.end_s) for a in copied for b in computed
        )


@pytest.mark.gpu
def test_streams_of_torch_copy_too() -> None:
    host = torch.arange(1000.0).pin_memory()
    there = torch.empty(1000, device="cuda")
    copy(there, host, TorchStream(torch.Stream("cuda"))).wait()
    assert torch.equal(there.cpu(), host)
