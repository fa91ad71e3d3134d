"""A model wide enough that ranks hold parts of its parameters: in narrow ones each parameter is whole on some rank."""

from __future__ import annotations

import pytest
import torch

from shardcomm import Communicator, Engine, Mesh, fully_shard
from support.nets import Net, assert_same, batch, loss_of, make, reference, train
from support.thread_ranks import run_mesh, run_threads

WIDTH = 24


def wide(seed: int = 0) -> Net:
    return make(seed=seed, width=WIDTH)


def cut(engine: Engine) -> list[str]:
    """Names of the parameters of which this rank has a part and not all."""
    return [
        placement.spec.name
        for unit in engine.units
        for bucket, _ in unit.buckets
        for i, placement in enumerate(bucket.layout.placements)
        if 0 < bucket.layout.piece(bucket.comm.rank, i).numel < placement.numel
    ]


@pytest.mark.covers("training parity", "granularity")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard"])
def test_training_equals_data_parallel(strategy: str) -> None:
    if strategy == "hybrid_shard":
        states = run_mesh(lambda mesh: train(mesh, wide(), strategy=strategy), 2, 2)
    else:
        states = run_threads(lambda comm: train(comm, wide(), strategy=strategy), 2)
    expected = reference(wide(), len(states))
    for state in states:
        assert_same(state, expected, bitwise=len(states) == 2, rtol=1e-4)


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("ranks", [2, 3])
def test_full_tensors_are_loaded_in_parts(ranks: int) -> None:
    def body(comm: Communicator) -> tuple[list[str], dict[str, torch.Tensor]]:
        engine = fully_shard(wide(seed=1), comm)
        engine.load_state_dict(wide(seed=7).state_dict())
        return cut(engine), engine.full_state_dict()

    results = run_threads(body, ranks)
    assert all(names for names, _ in results)
    for _, state in results:
        assert_same(state, wide(seed=7), bitwise=True)


def test_a_state_dict_of_another_rank_or_shape_is_refused() -> None:
    def body(comm: Communicator) -> None:
        engine = fully_shard(wide(), comm)
        full = wide(seed=7).state_dict()
        turned = full | {"blocks.1.up.weight": full["blocks.1.up.weight"].t().contiguous()}
        with pytest.raises(ValueError, match=r"blocks.1.up.weight has shape \(24, 73\)"):
            engine.load_state_dict(turned)
        with pytest.raises(ValueError, match=r"lacks \[\] and has unknown \['tail'\]"):
            engine.load_state_dict(full | {"tail": torch.ones(1)})
        for name, value in wide().state_dict().items():
            assert torch.equal(engine.full_state_dict()[name], value), name

    run_threads(body, 2)


def test_one_rank_alone_gets_a_full_state_dict_that_it_asked_for() -> None:
    def body(mesh: Mesh) -> int:
        engine = fully_shard(wide(), mesh, strategy="hybrid_shard")
        sizes = [len(engine.full_state_dict(rank)) for rank in range(mesh.size)]
        assert [bool(size) for size in sizes] == [rank == mesh.rank for rank in range(mesh.size)]
        return mesh.rank

    assert run_mesh(body, 2, 2) == [0, 1, 2, 3]


@pytest.mark.covers("gradient clipping")
def test_the_norm_counts_the_parts_of_all_ranks_once() -> None:
    def body(mesh: Mesh) -> torch.Tensor:
        model = wide()
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        loss_of(model, batch(0, 0)).backward()
        return engine.clip_grad_norm_(0.1)

    plain = wide()
    loss_of(plain, batch(0, 0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for norm in run_mesh(body, 2, 2):
        torch.testing.assert_close(norm, expected)


def test_parameters_that_were_written_between_forwards_are_seen() -> None:
    """After a forward without a backward some units are still gathered."""

    def body(comm: Communicator) -> None:
        model, plain = wide(), wide()
        fully_shard(model, comm)
        for scale in (1.0, 0.5, 2.0):
            for net in (model, plain):
                with torch.no_grad():
                    for param in net.parameters():
                        param.mul_(scale)
            torch.testing.assert_close(loss_of(model, batch(0, 0)), loss_of(plain, batch(0, 0)))

    run_threads(body, 2)


def test_from_the_second_step_on_units_are_gathered_as_they_are_called() -> None:
    """Ahead, and no more often than where they are registered in that order."""

    def gathered_bytes(variant: str) -> int:
        def body(comm: Communicator) -> int:
            model = make(variant, width=WIDTH, layers=5)
            engine = fully_shard(model, comm)
            before = 0
            for step in range(2):
                before = engine.traffic.gathered_bytes
                loss_of(model, batch(comm.rank, step)).backward()
            return engine.traffic.gathered_bytes - before

        return run_threads(body, 2)[0]

    assert gathered_bytes("reversed") == gathered_bytes("")


def test_what_is_frozen_in_a_unit_is_in_no_bucket_that_is_reduced() -> None:
    model = wide()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    engine = fully_shard(model, Communicator.local_group(1)[0])
    for unit in engine.units:
        for _, params in unit.buckets:
            assert len({param.shard.requires_grad for param in params}) == 1


def test_an_optimizers_state_is_loaded_with_its_learning_rates_and_without_what_it_lacks() -> None:
    def body(comm: Communicator) -> None:
        model = wide()
        engine = fully_shard(model, comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loss_of(model, batch(comm.rank, 0)).backward()
        optimizer.step()
        state = engine.optimizer_state(optimizer)
        saved = state.state_dict()
        saved["param_groups"][0]["lr"] = 0.007
        dropped, param = next(
            (name, param) for name, param in model.named_parameters() if param in optimizer.state
        )
        del saved["state"][dropped]
        state.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.007
        assert param not in optimizer.state
        assert len(optimizer.state) > 0

    run_threads(body, 2)


@pytest.mark.covers("odd forwards")
def test_a_unit_that_is_called_several_times_is_reduced_once() -> None:
    def reduced_bytes(forwards: int) -> int:
        def body(comm: Communicator) -> int:
            model = wide()
            engine = fully_shard(model, comm)
            sum(loss_of(model, batch(comm.rank, i)) for i in range(forwards)).backward()  # type: ignore[union-attr]
            return engine.traffic.reduced_bytes

        return run_threads(body, 2)[0]

    # The root's inputs are token numbers, whose gradients nobody asks for: blocks only are marked.
    assert reduced_bytes(2) == reduced_bytes(1)


def test_after_a_step_nothing_is_left_to_wait_for() -> None:
    def body(comm: Communicator) -> None:
        model = wide()
        engine = fully_shard(model, comm)
        for step in range(2):
            loss_of(model, batch(comm.rank, step)).backward()
            for unit in engine.units:
                assert (
                    unit.full.gathers == unit.gradients.reduces == unit.gradients.all_reduces == []
                )

    run_threads(body, 2)
