"""A failure of one of an engine's groups: all of them end, survivors keep their rows, and the engine can be closed."""

from __future__ import annotations

from itertools import count

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardcomm import CommError, Communicator, Mesh, Policy, fully_shard, launch
from support.nets import batch, loss_of, make
from support.thread_ranks import run_mesh, run_threads

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


@pytest.mark.covers("failed ranks")
@pytest.mark.parametrize("group", ["shard", "replicate"])
@pytest.mark.parametrize("steps", [0, 2], ids="after {} steps".format)
def test_a_failure_of_one_group_of_a_mesh_ends_all_groups_and_names_its_cause(
    group: str, steps: int
) -> None:
    """Everybody lives on: who is in no group with rank 0 hears it from those who are, and not by a deadline."""

    def train(mesh: Mesh) -> None:
        for step in count():
            if mesh.rank == 0 and step == steps:
                getattr(mesh, group).abort("the data is bad")
            if step == 0:
                model = make(layers=2)
                engine = fully_shard(model, mesh, strategy="hybrid_shard")
            loss_of(model, batch(mesh.rank, step)).backward()
            engine.clip_grad_norm_(1.0)

    def body(mesh: Mesh) -> str:
        with pytest.raises(CommError) as caught:
            train(mesh)
        for comm in (mesh.shard, mesh.replicate):
            with pytest.raises(CommError):
                comm.all_reduce(torch.zeros(4))
        return str(caught.value)

    for message in run_mesh(body, 2, 2):
        assert "rank 0 aborted: the data is bad" in message


@pytest.mark.covers("failed ranks", "state dicts", "CPU offload")
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("group", ["shard", "replicate"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_survivors_save_their_rows_load_and_close(when: str, group: str, cpu_offload: bool) -> None:
    def body(mesh: Mesh) -> None:
        model = make(layers=4)
        engine = fully_shard(
            model, mesh, strategy="hybrid_shard", prefetch=2, cpu_offload=cpu_offload
        )
        rows = [p.to_local().clone() for p in model.parameters()]

        def fail(*_: object) -> None:
            if mesh.rank == 0:
                getattr(mesh, group).abort("the data is bad")

        if when == "forward":
            model.blocks[1].register_forward_pre_hook(fail)
        else:
            model.blocks[1].register_full_backward_hook(fail)

        def train() -> None:
            for step in range(2):
                loss_of(model, batch(mesh.rank, step)).backward()

        with pytest.raises(CommError, match="the data is bad"):
            train()
        for save in (engine.state_dict, model.state_dict):
            assert save().keys() == make(layers=4).state_dict().keys()
            assert all(map(torch.equal, [p.to_local() for p in model.parameters()], rows))
        engine.load_state_dict({n: 2 * v for n, v in make(layers=4).state_dict().items()})
        for param, row in zip(model.parameters(), rows, strict=True):
            assert torch.equal(param.to_local(), 2 * row)
        engine.release()
        for call in (train, engine.full_state_dict):
            with pytest.raises(CommError, match="the data is bad"):
                call()
        engine.close()
        engine.close()

    run_mesh(body, 2, 2)


def test_a_full_tensor_that_fails_ends_the_columns_too() -> None:
    """The other row hears it from the columns, and not by the deadline."""

    def body(mesh: Mesh) -> None:
        model = make(layers=2)
        fully_shard(model, mesh, strategy="hybrid_shard")
        if mesh.rank == 0:
            mesh.shard.abort("the data is bad")
        call = model.head.weight.full_tensor if mesh.rank < 2 else mesh.replicate.barrier
        with pytest.raises(CommError, match="the data is bad"):
            call()

    run_mesh(body, 2, 2, deadline_s=10)


def test_a_full_tensor_of_an_expert_that_fails_ends_the_group_of_all() -> None:
    pair = Communicator.local_group(2, deadline_s=10)
    alone = Communicator.local_group(1)[0]

    def body(comm: Communicator) -> None:
        has_pair = comm.rank < 2
        model = make(layers=2)
        of_some = Policy(comm=pair[comm.rank] if has_pair else alone)
        fully_shard(model, comm, units={model.blocks[0]: of_some})
        if comm.rank == 0:
            pair[0].abort("the data is bad")
        call = model.blocks[0].up.weight.full_tensor if has_pair else comm.barrier
        with pytest.raises(CommError, match="the data is bad"):
            call()

    run_threads(body, 3, deadline_s=10)


def test_a_full_tensor_of_one_rank_alone_meets_no_gather_of_a_forward() -> None:
    """As `if rank == 0: print(p.full_tensor())` has it: both gather the root's elements, and of the same length."""

    def body(comm: Communicator) -> None:
        model = make(layers=2)
        fully_shard(model, comm)
        if comm.rank == 0:
            with pytest.raises(CommError, match=r"^all of 'head\.weight' .*every rank must gather"):
                model.head.weight.full_tensor()
        else:
            with pytest.raises(CommError, match=r"rank 0 .*all_gather"):
                loss_of(model, batch(0, 0))

    run_threads(body, 2, deadline_s=10)


def close_with_a_change_that_is_lost() -> None:
    dist.init_process_group("gloo")
    model = make(layers=2)
    engine = fully_shard(model, init_device_mesh("cpu", (2,)))
    engine.unit(model).unshard()
    for param in model.parameters():
        param.data.add_(1.0)
    with pytest.raises(RuntimeError, match="was changed"):
        engine.close()
    with pytest.raises(CommError, match="closed"):
        engine.mesh.shard.barrier()
    engine.close()
    dist.destroy_process_group()


def test_an_engine_leaves_its_groups_whatever_its_closing_raises() -> None:
    launch(close_with_a_change_that_is_lost, 2, timeout_s=60)
