"""`ExponentialMovingAverage` against torch's AveragedModel on a plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardcomm import (
    CommError,
    Communicator,
    Engine,
    ExponentialMovingAverage,
    Mesh,
    fully_shard,
    launch,
)
from support.thread_ranks import run_mesh, run_threads
from support.twins import WIDTH, Chain, twins, values

DECAY = 0.8


def step(model: nn.Module, seed: int) -> None:
    """Plain SGD, without anything that remembers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(values(3, WIDTH, seed=seed)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def averaged(plain: nn.Module) -> AveragedModel:
    return AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def assert_average(ema: ExponentialMovingAverage, engine: Engine, expected: AveragedModel) -> None:
    with ema.applied():
        state = engine.full_state_dict()
    for name, value in expected.module.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)


Body = Callable[[Any, Engine, Any], Any]


def with_sharded(body: Body, **options: Any) -> None:
    def rank(comm: Communicator) -> None:
        model, plain = twins(Chain)
        body(model, fully_shard(model, comm, **options), plain)

    run_threads(rank, 2)


@pytest.mark.covers("averages of parameters")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "no_shard"},
        {"granularity": "element", "shard_dim": "auto"},
        {"granularity": "tensor"},
        {"cpu_offload": True},
    ],
    ids=lambda o: next(iter(o), "full_shard"),
)
def test_the_average_is_that_of_torch_on_a_plain_model(options: dict[str, Any]) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        ema, expected = ExponentialMovingAverage(engine, DECAY), averaged(plain)
        assert_average(ema, engine, expected)
        for seed in range(4):
            for each in (model, plain):
                step(each, seed)
            ema.update()
            expected.update_parameters(plain)
            assert ema.n_averaged == int(expected.n_averaged)
            assert_average(ema, engine, expected)
            x = values(2, WIDTH, seed=9)
            with torch.no_grad(), ema.applied():
                torch.testing.assert_close(model(x), expected(x))
                torch.testing.assert_close(model.blocks[1](x), expected.module.blocks[1](x))  # type: ignore[union-attr,index]
            torch.testing.assert_close(model(x), plain(x))

    with_sharded(body, **options)


@pytest.mark.covers("averages of parameters")
@pytest.mark.parametrize("options", [{}, {"granularity": "tensor"}])
def test_an_average_of_torch_from_before_is_updated_in_gathered_alone(
    options: dict[str, Any],
) -> None:
    def rank(comm: Communicator) -> None:
        model, plain = twins(Chain)
        average, expected = averaged(model), averaged(plain)
        engine = fully_shard(model, comm, **options)
        for seed in range(3):
            for each in (model, plain):
                step(each, seed)
            with pytest.raises(RuntimeError, match=r"ExponentialMovingAverage.*engine\.gathered"):
                average.update_parameters(model)
            with engine.gathered():
                average.update_parameters(model)
            expected.update_parameters(plain)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(average.state_dict()[name], value, msg=name)

    run_threads(rank, 2)


def test_an_average_moves_nothing_and_is_as_large_as_the_shards() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        step(model, 0)
        moved = engine.traffic.gathered_bytes
        ema = ExponentialMovingAverage(engine)
        for _ in range(3):
            ema.update()
        assert engine.traffic.gathered_bytes == moved
        held = sum(
            part.nbytes for v in ema.state_dict().values() for part in getattr(v, "parts", ())
        )
        assert held <= engine.footprint().parameter_bytes

    with_sharded(body)


@pytest.mark.covers("averages of parameters")
def test_of_ranks_in_two_dimensions() -> None:
    def rank(mesh: Mesh) -> None:
        model, plain = twins(Chain)
        engine = fully_shard(model, mesh, strategy="hybrid_shard")
        ema, expected = ExponentialMovingAverage(engine, DECAY), averaged(plain)
        for seed in range(3):
            for each in (model, plain):
                step(each, seed)
            ema.update()
            expected.update_parameters(plain)
        assert_average(ema, engine, expected)

    run_mesh(rank, 2, 2)


@pytest.mark.covers("averages of parameters", "exceptions")
def test_the_trained_parameters_are_back_after_an_exception() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        ema = ExponentialMovingAverage(engine)
        ema.update()
        step(model, 0)
        before = engine.full_state_dict()

        def evaluate() -> None:
            with ema.applied():
                model(torch.ones(3, WIDTH + 1))

        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            evaluate()
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, before[name])
        assert_average(ema, engine, averaged(plain))  # `plain` has not stepped

    with_sharded(body)


def test_memory_that_is_not_there_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = twins(Chain)
    ema = ExponentialMovingAverage(fully_shard(model, Communicator.local_group(1)[0]))
    ema.update()
    step(model, 0)
    before = [p.detach().clone() for p in model.parameters()]
    clone, clones = torch.Tensor.clone, iter([True])

    def out_of_memory(*args: Any, **_: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor) and next(clones, False):
            return clone(args[0])
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clone", out_of_memory)
        patched.setattr(torch, "empty", out_of_memory)
        with pytest.raises(MemoryError), ema.applied():
            pass
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)


def test_integers_stay_the_models_own(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    model.table = nn.Parameter(torch.arange(4), requires_grad=False)
    engine = fully_shard(model, Communicator.local_group(1)[0])
    ema = ExponentialMovingAverage(engine)
    ema.update()
    dcp.save({"ema": ema}, checkpoint_id=tmp_path)
    with torch.no_grad():
        model.table.add_(1)
        model.weight.add_(1)
    ema.update()
    dcp.load({"ema": ema}, checkpoint_id=tmp_path)
    assert ema.n_averaged == 1
    assert model.table.tolist() == [1, 2, 3, 4]
    with ema.applied():
        assert model.table.tolist() == [1, 2, 3, 4]


@pytest.mark.covers("averages of parameters", "failed ranks")
def test_the_trained_parameters_are_back_after_a_rank_has_failed() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Chain)
        engine = fully_shard(model, comm)
        ema = ExponentialMovingAverage(engine)
        ema.update()
        step(model, 0)
        rows = [p.to_local() for p in model.parameters()]
        before = [each.clone() for each in rows]

        def evaluate() -> None:
            with ema.applied():
                comm.abort("over")
                model(values(3, WIDTH))

        with pytest.raises(CommError, match="over"):
            evaluate()
        assert all(map(torch.equal, rows, before))

    run_threads(body, 2)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_training_where_the_average_is_applied_is_refused(strategy: str) -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        ema = ExponentialMovingAverage(engine)
        before = engine.full_state_dict()
        with ema.applied():
            for call in (ema.update, ema.state_dict, lambda: ema.load_state_dict({})):
                with pytest.raises(RuntimeError, match="inside of applied"):
                    call()
            with pytest.raises(RuntimeError, match="inside of applied"), ema.applied():
                pass
        with pytest.raises(RuntimeError, match="were changed inside of applied"), ema.applied():
            step(model, 0)
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, before[name])

    with_sharded(body, strategy=strategy)


def test_wrong_arguments_are_named() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        with pytest.raises(TypeError, match="engine is a Chain"):
            ExponentialMovingAverage(model)
        for decay in (-0.1, 1.5, "0.9", True, float("nan")):
            with pytest.raises(ValueError, match="decay is"):
                ExponentialMovingAverage(engine, decay)  # type: ignore[arg-type]
        ema = ExponentialMovingAverage(engine)
        state = ema.state_dict()
        with pytest.raises(ValueError, match=r"lacks \['module.stem.bias'\]"):
            ema.load_state_dict({n: v for n, v in state.items() if n != "module.stem.bias"})
        with pytest.raises(ValueError, match=r"module\.stem\.bias has shape"):
            ema.load_state_dict({**state, "module.stem.bias": torch.zeros(3)})

    with_sharded(body)


def test_torchs_average_is_refused_with_ours_named() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        with pytest.raises(RuntimeError, match="ExponentialMovingAverage"):
            AveragedModel(model)(values(3, WIDTH))

    for strategy in ("full_shard", "no_shard"):
        with_sharded(body, strategy=strategy)


def test_full_tensors_load() -> None:
    def body(model: Any, engine: Engine, plain: Any) -> None:
        expected = averaged(plain)
        step(plain, 0)
        expected.update_parameters(plain)
        ema = ExponentialMovingAverage(engine)
        ema.load_state_dict(expected.state_dict())
        assert ema.n_averaged == 1
        assert_average(ema, engine, expected)

    with_sharded(body)


def saved(folder: str) -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group() as comm:
        model, _ = twins(Chain)
        engine = fully_shard(model, comm)
        ema = ExponentialMovingAverage(engine, DECAY)
        for seed in range(3):
            step(model, seed)
            ema.update()
        dcp.save({"model": engine, "ema": ema}, checkpoint_id=folder)
    dist.destroy_process_group()


@pytest.mark.covers("averages of parameters", "checkpoints")
def test_a_checkpoint_is_loaded_by_another_number_of_ranks_and_by_torch(tmp_path: Path) -> None:
    launch(saved, 3, (str(tmp_path),), timeout_s=60)
    model, plain = twins(Chain)
    expected = averaged(plain)
    for seed in range(3):
        step(plain, seed)
        expected.update_parameters(plain)
    engine = fully_shard(model, Communicator.local_group(1)[0])
    ema = ExponentialMovingAverage(engine, DECAY)
    dcp.load({"model": engine, "ema": ema}, checkpoint_id=tmp_path, no_dist=True)
    assert ema.n_averaged == 3
    assert_average(ema, engine, expected)
    theirs = averaged(twins(Chain)[1])
    dcp.load({"ema": theirs}, checkpoint_id=tmp_path, no_dist=True)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value)
