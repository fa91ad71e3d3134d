"""Every strategy trains as data parallel does: as torch's DDP, or one process that averages over them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardcomm import STRATEGIES, Communicator, Mesh, fully_shard, launch
from support.accumulation import ACCUMULATION, STEPS, train
from support.nets import Net, assert_same, batch, loss_of, make, sgd_of
from support.rank_sums import combined
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Chain, assert_same_gradients, local, twins, values

Run = Callable[[Callable[..., dict[str, torch.Tensor]]], list[dict[str, torch.Tensor]]]


@functools.cache
def expected(ranks: int, half: bool, micro: int) -> Net:
    """Gradients of the ranks' batches, summed per rank and then over the ranks, in fp32."""
    model = make(layers=3)
    optimizer = sgd_of(model)
    for step in range(STEPS):
        each_ranks: list[list[torch.Tensor]] = []
        for rank in range(ranks):
            sums = [torch.zeros_like(param) for param in model.parameters()]
            for m in range(micro):
                replica = copy.deepcopy(model)
                if half:
                    for param in replica.parameters():
                        param.data = param.data.to(torch.bfloat16)
                loss_of(replica, batch(rank, step * micro + m)).backward()
                for summed, param in zip(sums, replica.parameters(), strict=True):
                    assert param.grad is not None
                    summed.add_(param.grad)
            each_ranks.append(sums)
        for param, *of_ranks in zip(model.parameters(), *each_ranks, strict=True):
            param.grad = combined(of_ranks) * (1.0 / ranks)
        optimizer.step()
    return model


@pytest.mark.covers("training parity", "gradient accumulation", "mixed precision")
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_one_dimension(strategy: str, ranks: int, half: bool, accumulation: str) -> None:
    wanted = expected(ranks, half, 2 if accumulation else 1)
    for state in run_threads(lambda comm: train(comm, strategy, half, accumulation), ranks):
        assert_same(state, wanted, bitwise=accumulation not in ("every", "put_off"))


@pytest.mark.covers("training parity", "gradient accumulation", "mixed precision")
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("replicas", "shards"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
def test_two_dimensions(replicas: int, shards: int, half: bool, accumulation: str) -> None:
    def body(mesh: Mesh) -> dict[str, torch.Tensor]:
        return train(mesh, "hybrid_shard", half, accumulation)

    wanted = expected(replicas * shards, half, 2 if accumulation else 1)
    states = run_mesh(body, replicas, shards)
    for state in states:
        in_order = accumulation not in ("every", "put_off")
        assert_same(state, wanted, bitwise=in_order and replicas * shards <= 2)
        for name, value in states[0].items():
            if not name.endswith("calls"):
                assert torch.equal(state[name], value), name  # the same on every replica


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("shards", [1, 2])
def test_all_reduces_that_are_put_off_come_once_and_for_all_units(shards: int) -> None:
    """Also of a unit that the last backward does not come to."""

    def body(mesh: Mesh) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        x = values(3, WIDTH)

        def backward() -> int:
            before = engine.traffic.reduced_bytes
            for net in (model, plain):
                net(x).sum().backward()
            return engine.traffic.reduced_bytes - before

        both = backward()
        model.zero_grad()
        plain.zero_grad()
        engine.set_requires_all_reduce(False)
        reduced = backward()
        assert reduced < both
        assert all(param.grad is None for param in model.parameters())
        engine.set_requires_all_reduce(True)
        for net in (model, plain):
            net.skipped = {1}
        backward()
        assert_same_gradients(engine, model, plain)

        with pytest.raises(ValueError, match="requires is 'no'; it must be True or False"):
            engine.set_requires_all_reduce("no")  # type: ignore[arg-type]

    run_mesh(body, 2, shards)


@pytest.mark.covers("exceptions")
def test_an_exception_forgets_what_an_all_reduce_was_put_off_for() -> None:
    def body(mesh: Mesh) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, mesh, strategy="hybrid_shard")

        def fail(grad: torch.Tensor) -> None:
            raise LookupError

        engine.set_requires_all_reduce(False)
        model(values(3, WIDTH)).sum().backward()
        engine.set_requires_all_reduce(True)
        model.between = lambda i, x: x.register_hook(fail) and x if i == 1 else x
        with pytest.raises(LookupError):
            model(values(3, WIDTH)).sum().backward()
        model.between = lambda i, x: x
        model.zero_grad()
        for net in (model, plain):
            net(values(3, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_mesh(body, 2, 2)


@pytest.mark.covers("gradient accumulation", "granularity", "owners")
def test_all_reduces_of_uneven_parts_are_put_off() -> None:
    def body(mesh: Mesh) -> dict[str, torch.Tensor]:
        return train(mesh, "hybrid_shard", False, "put_off", granularity="tensor")

    for state in run_mesh(body, 2, 2):
        assert_same(state, expected(4, False, 2), bitwise=False)


def test_matrix_has_every_strategy() -> None:
    assert {*STRATEGIES} == {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard"}


@pytest.mark.parametrize("strategy", ["no_shard", "hybrid_shard"])
def test_replicas_start_from_rank_0(strategy: str) -> None:
    def states(mesh: Mesh) -> dict[str, torch.Tensor]:
        ranks = mesh if strategy == "hybrid_shard" else mesh.replicate
        model = make(seed=mesh.rank)
        return fully_shard(model, ranks, strategy=strategy).full_state_dict()

    shards = 2 if strategy == "hybrid_shard" else 1
    for state in run_mesh(states, 2, shards):
        assert_same(state, make(seed=0), bitwise=True)


@pytest.mark.covers("frozen and tied parameters")
def test_parameter_used_by_one_replica_only_has_a_gradient_on_all_that_hold_it() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.paths = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, path: int) -> torch.Tensor:
            out: torch.Tensor = self.paths[path](x)
            return out

    def body(mesh: Mesh) -> list[torch.Tensor | None]:
        model = Choice()
        fully_shard(model, mesh, units=[], strategy="hybrid_shard")
        model(torch.ones(1, 4), 1 if mesh.rank == 3 else 0).sum().backward()
        return [None if (grad := path.weight.grad) is None else local(grad) for path in model.paths]

    for first, second, never in run_mesh(body, 2, 2):
        assert first is not None
        assert first.eq(0.75).all()
        assert second is not None
        assert second.eq(0.25).all()
        assert never is None


@pytest.mark.covers("gradient clipping")
def test_clip_grad_norm_counts_every_parameter_once() -> None:
    plain = make()
    loss_of(plain, batch(0, 0)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)

    def body(mesh: Mesh) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = make()
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        loss_of(model, batch(0, 0)).backward()  # everywhere the same: the mean is one rank's
        clipped = engine.clip_grad_norm_(0.1)
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.copy_(param.grad)
        return clipped, engine.full_state_dict()

    for clipped, grads in run_mesh(body, 2, 2):
        torch.testing.assert_close(clipped, norm)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad)


@pytest.mark.covers("tracing")
def test_shards_are_all_reduced_after_their_reduce_and_only_shards() -> None:
    def body(mesh: Mesh) -> None:
        model = make()
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        loss_of(model, batch(mesh.rank, 0)).backward()
        before = engine.traffic.reduced_bytes
        with engine.trace() as trace:
            loss_of(model, batch(mesh.rank, 1)).backward()
        spans = {(span.row, span.name): span for span in trace.spans()}
        for name in ("blocks.0", "blocks.3", "(root)"):
            reduce, all_reduce = spans["reduce", name], spans["all_reduce", name]
            assert reduce.end_s <= all_reduce.begin_s
            # Of the unit half goes to the other rank of the row; a shard once to and once from the other row.
            assert all_reduce.nbytes == reduce.nbytes > 0
        sent = sum(s.nbytes for s in spans.values() if s.row in ("reduce", "all_reduce"))
        assert engine.traffic.reduced_bytes - before == sent

    run_mesh(body, 2, 2)


@pytest.mark.covers("failed ranks")
def test_a_rank_that_fails_ends_its_row_and_its_column() -> None:
    def body(mesh: Mesh) -> None:
        model = make()
        fully_shard(model, mesh, strategy="hybrid_shard")
        loss_of(model, batch(mesh.rank, 0)).backward()
        if mesh.rank == 3:
            raise RuntimeError("rank 3 has had enough")
        loss_of(model, batch(mesh.rank, 1)).backward()

    with pytest.raises(RuntimeError, match="rank 3 has had enough"):
        run_mesh(body, 2, 2)


@pytest.mark.parametrize(
    ("ranks_of", "strategy", "message"),
    [
        (
            lambda mesh: mesh,
            "full_shard",
            "needs ranks in 1 dimension, and comm has 2; give a Comm",
        ),
        (lambda mesh: mesh, "no_shard", "needs ranks in 1 dimension"),
        (lambda mesh: mesh.shard, "hybrid_shard", "needs ranks in 2 dimensions, and comm has 1; "),
        (lambda mesh: (2, 2), "hybrid_shard", "comm is a tuple; it must be"),
        (lambda mesh: Mesh(mesh.shard, 2), "hybrid_shard", "replicate is a int; it must be"),
    ],
)
def test_ranks_that_a_strategy_cannot_use_are_named(
    ranks_of: Callable[[Mesh], object], strategy: str, message: str
) -> None:
    mesh = Mesh(Communicator.local_group(1)[0], Communicator.local_group(1)[0])
    with pytest.raises((ValueError, TypeError), match=message):
        fully_shard(make(), ranks_of(mesh), strategy=strategy)  # type: ignore[arg-type]


def train_on_meshes(shapes: list[tuple[int, ...]]) -> list[dict[str, torch.Tensor]]:
    """DDP's parameters after some steps, then those of fully_shard over a DeviceMesh of each shape."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, states = dist.get_rank(), []
    ddp = DistributedDataParallel(make(layers=3))
    optimizer = sgd_of(ddp)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        optimizer.step()
    states.append({name: value.clone() for name, value in ddp.module.state_dict().items()})
    for shape in shapes:
        model = make(layers=3)
        strategy = "hybrid_shard" if len(shape) == 2 else "full_shard"
        engine = fully_shard(model, init_device_mesh("cpu", shape), strategy=strategy)
        assert engine.mesh.rank == rank
        assert engine.mesh.size == dist.get_world_size()
        optimizer = sgd_of(model)
        for step in range(STEPS):
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(engine.full_state_dict())
        engine.close()
    dist.destroy_process_group()
    return states


@pytest.mark.covers("training parity")
def test_device_meshes_at_2_processes_are_bitwise_ddp() -> None:
    for ddp, *ours in launch(train_on_meshes, 2, ([(2,), (1, 2), (2, 1)],), timeout_s=120):
        for state in ours:
            for name, value in ddp.items():
                assert torch.equal(state[name], value), name


@pytest.mark.covers("training parity")
def test_device_meshes_at_4_processes_are_ddp_within_rounding() -> None:
    for ddp, *ours in launch(train_on_meshes, 4, ([(4,), (2, 2)],), timeout_s=120):
        for state in ours:
            for name, value in ddp.items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)
