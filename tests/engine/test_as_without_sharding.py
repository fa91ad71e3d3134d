"""What torch's tools do to a sharded model as without sharding: values, gradients, copies and state dicts."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.utils import vector_to_parameters

from shardcomm import Communicator, Engine, fully_shard, launch
from support.generator import seeded
from support.thread_ranks import run_threads
from support.tied import IDS, RANKS, Tied, model_of, with_sharded
from support.twins import WIDTH, Chain, local, twins, values


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_equality_is_of_the_whole_tensors(granularity: str) -> None:
    """A difference that one rank has is seen by all; Lightning's BaseFinetuning looks for parameters so."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight = model.embed.weight
        same = weight.detach().clone()
        assert torch.equal(weight, weight)
        assert weight.equal(same)
        with torch.no_grad():
            rows = local(same)
            if len(rows) > 0 and (granularity == "tensor" or engine.mesh.shard.rank == 0):
                rows[0, 0] += 1
        assert not torch.equal(weight, same)
        others = [p for p in model.parameters() if p is not weight]
        assert others
        assert not any(torch.equal(weight, other) for other in others)

    with_sharded(body, granularity=granularity)


def test_equality_with_a_plain_tensor_is_refused_where_a_rank_has_all_by_chance() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(4, 1)  # one row, which one of the ranks has
        fully_shard(model, comm)
        with pytest.raises(RuntimeError, match=r"^equal of 'weight'"):
            torch.equal(model.weight, torch.ones(1, 4))

    run_threads(body, 2)


def test_a_whole_parameter_is_gathered_in_a_forward_that_gathers_ahead() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(lambda: Chain(layers=6))
        fully_shard(model, comm, prefetch=3)

        def between(i: int, x: torch.Tensor) -> torch.Tensor:
            last: Any = model.blocks[-1]
            assert torch.equal(last.linear.weight.full_tensor(), plain.blocks[-1].linear.weight)
            return x

        model.between = between
        for _ in range(20):
            model(values(3, WIDTH)).sum().backward()

    run_threads(body, RANKS)


def test_elementwise_arithmetic_is_that_of_the_whole() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            average = [p.detach().clone() for p in each.parameters()]
            with torch.no_grad():
                for p, mean in zip(each.parameters(), average, strict=True):
                    p.mul_(2).sub_(p.grad, alpha=0.5)
                    mean.lerp_(p, 0.25).abs_()
                torch._foreach_copy_(list(each.parameters()), average)
                p.data = torch.zeros_like(p)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]
        assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body)


@pytest.mark.parametrize("of", [lambda p: p, lambda p: p.data, lambda p: p.grad])
def test_elements_are_chosen_by_a_mask(of: Callable[[nn.Parameter], Any]) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        with torch.no_grad():
            for each in (model, twin):
                for p in each.parameters():
                    of(p).masked_fill_(of(p).isnan() | (of(p) > 0.1), 0.1)
                    of(p).copy_(torch.where(of(p) < -0.1, -0.1, of(p)))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(of(p).full_tensor(), of(q).detach())

    with_sharded(body)


def test_what_changes_nothing_is_let_through() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        model.float().cpu().to(torch.float32).requires_grad_(True).train()
        model.act = nn.GELU()  # type: ignore[assignment]
        model.embed.weight = model.embed.weight
        assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body)


def test_modules_without_parameters_are_put_in_and_taken_out() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            each.blocks.insert(1, nn.ReLU())
            each(IDS)
            del each.blocks[0]
        for _ in range(2):
            assert torch.equal(model(IDS), twin(IDS))

    with_sharded(body)


def test_values_put_in_a_parameters_place_are_trained() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            for p in each.parameters():
                p.data = torch.full_like(p, 0.5)
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each.zero_grad()
            each(IDS).square().sum().backward()
            optimizer.step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("take", [lambda p: p.data, lambda p: p.detach()])
def test_values_are_swapped_for_averages_and_back(
    take: Callable[[nn.Parameter], torch.Tensor], strategy: str
) -> None:
    """As a widespread average of weights does it, by reference."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        outputs = []
        for each in (model, twin):
            params = list(each.parameters())
            averages = [p.data.clone().mul_(0.5) for p in params]
            held = [take(p) for p in params]
            for p, average in zip(params, averages, strict=True):
                p.data = average
            outputs.append([each(IDS)])
            for p, before in zip(params, held, strict=True):
                p.data = before
            for p in params:
                p.data = p.data  # changes nothing
            outputs[-1].append(each(IDS))
            for p, average in zip(params, averages, strict=True):  # the other common way
                before = p.data
                p.data = average
                p.data = before.mul_(0.25)
            outputs[-1].append(each(IDS))
        ours, theirs = outputs
        torch.testing.assert_close(ours, theirs)

    with_sharded(body, strategy=strategy)


def test_an_alias_shows_what_is_written_in_place() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for p in model.parameters():
            alias, values = p.data, torch.full_like(p, 0.5)
            p.data.mul_(0)
            assert not local(alias).any()
            shape = local(values).shape
            p.data = local(values).t() if shape[0] == shape[-1] > 1 else values
            assert not local(alias).any()
            p.data.mul_(2)
            assert not local(alias).any()
            assert bool((local(p) == 1).all())

    with_sharded(body)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_and_their_weights_stay_in_place(
    kind: Any, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For cuDNN they would move their weights to memory of their own, in each forward."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(WIDTH, WIDTH, 2, batch_first=True)
            self.head = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layers.flatten_parameters()
            return self.head(self.layers(x)[0])  # type: ignore[no-any-return]

    def move(layers: Any) -> None:
        for p in layers.parameters():
            p.data = p.data.clone()

    with seeded(0):
        plain, x = Recurrent(), torch.randn(2, 3, WIDTH)
    nets = [copy.deepcopy(plain) for _ in range(2 * RANKS)]
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)

    def rank(comm: Communicator) -> None:
        model, twin = nets[2 * comm.rank : 2 * comm.rank + 2]
        engine = fully_shard(model, comm, units=[kind, nn.Linear], strategy=strategy)
        for each in (model, twin):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                each(x).square().sum().backward()
                optimizer.step()
        torch.testing.assert_close(engine.full_state_dict(), dict(twin.state_dict()))

    run_threads(rank, RANKS)


@pytest.mark.parametrize(
    "put",
    [
        lambda m: [setattr(p, "data", torch.full_like(p, 0.5)) for p in m.parameters()],
        lambda m: vector_to_parameters(torch.linspace(-1, 1, 184), m.parameters()),
        lambda m: [p.fill_(0.5) for p in m.to_empty(device="cpu").parameters()],
        lambda m: m.load_state_dict(model_of(seed=1).state_dict(), assign=True),
    ],
)
def test_values_put_in_the_place_of_whole_parameters_are_trained(
    put: Callable[[Tied], Any],
) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            each.zero_grad()
            with torch.no_grad():
                put(each)
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            each(IDS).square().sum().backward()
            optimizer.step()
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    with_sharded(body, strategy="no_shard")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_a_copy_of_whole_parameters_computes_by_itself(strategy: str, *, compiled: bool) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        if strategy == "no_shard":
            copied = copy.deepcopy(model)
        else:
            with engine.gathered():
                copied = copy.deepcopy(model)
        expected = twin(IDS)
        for param in model.parameters():
            param.data = 2 * param.data
        with torch.no_grad():
            for each in (copied, copy.deepcopy(copied)):
                torch.testing.assert_close(each(IDS), expected)
        assert not torch.allclose(model(IDS), expected)

    def rank(comm: Communicator) -> None:
        model, twin = model_of(), model_of()
        if compiled:
            model.blocks[0].compile(backend="eager")
        body(model, fully_shard(model, comm, units=[nn.Linear], strategy=strategy), twin)

    run_threads(rank, 2)


def test_a_copy_of_whole_parameters_is_a_plain_model() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        copied = copy.deepcopy(model)
        copied.load_state_dict(model_of(seed=1).state_dict())
        assert torch.equal(copied.half().blocks[0].weight, model_of(seed=1).blocks[0].weight.half())  # type: ignore[arg-type,operator]
        assert torch.equal(model(IDS), twin(IDS))
        saved = io.BytesIO()
        torch.save(model.embed.weight, saved)
        saved.seek(0)
        assert type(torch.load(saved)) is nn.Parameter

    with_sharded(body, strategy="no_shard")


def test_values_put_in_a_gradients_place_are_stepped_with() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            for p in each.parameters():
                assert p.grad is not None
                p.grad.data = torch.full_like(p.grad, 2.0)
            torch.optim.SGD(each.parameters(), lr=0.1).step()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach())  # type: ignore[attr-defined]

    with_sharded(body)


def test_a_copy_of_a_whole_parameter_may_have_any_memory() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        weight = copy.copy(model.embed.weight)
        assert weight.share_memory_().is_shared()
        weight.detach().set_(torch.zeros(1))  # type: ignore[call-overload]

    with_sharded(body, strategy="no_shard")


def test_where_rows_are_may_be_asked() -> None:
    """As accelerate and data loaders ask it. Without a GPU no memory is pinned."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for p in model.parameters():
            assert p.grad is not None
            assert not any(t.is_pinned() for t in (p, p.grad, p.data))

    with_sharded(body)


def test_old_loops_that_detach_gradients_zero_them() -> None:
    """As optimizers of torch 1.0 did it, and tutorials still do."""

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        for each in (model, twin):
            for p in each.parameters():
                assert p.grad is not None
                p.grad.detach_()
                p.grad.zero_()
            each(IDS).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(grad, q.grad)

    with_sharded(body)


def test_a_tensor_is_converted_to_be_like_rows() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        p = model.embed.weight
        ids = torch.arange(3)
        for like in (ids.type_as(p), ids.to(p), ids.to(p.data)):
            assert type(like) is torch.Tensor
            torch.testing.assert_close(like, ids.float())
        half = p.data.to(torch.bfloat16)
        torch.testing.assert_close(half.full_tensor(), twin.embed.weight.bfloat16())  # type: ignore[attr-defined]

    with_sharded(body)


def set_to_zeros(model: Tied) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def assert_same(ours: Sequence[Any], theirs: Sequence[torch.Tensor]) -> None:
    for grad, expected in zip(ours, theirs, strict=True):
        full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(full, expected)


@pytest.mark.parametrize("zero", [Tied.zero_grad, set_to_zeros])
@pytest.mark.parametrize("kept_as", ["grad", "data", "detach"])
@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"strategy": "no_shard"}])
def test_a_gradient_that_is_kept_stays_when_the_next_comes(
    options: dict[str, Any], kept_as: str, zero: Callable[[Tied], None]
) -> None:
    def grads_of(model: Tied) -> list[torch.Tensor]:
        grads = [p.grad for p in model.parameters()]
        if kept_as == "data":
            return [grad.data for grad in grads]
        return grads if kept_as == "grad" else [grad.detach() for grad in grads]

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        kept = []
        for each in (model, twin):
            loss = each(IDS).square().sum()
            zero(each)
            loss.backward(retain_graph=True)
            kept.append(grads_of(each))
            zero(each)
            (3 * loss).backward()
            kept.append(grads_of(each))
        assert_same(kept[0] + kept[1], kept[2] + kept[3])

    with_sharded(body, **options)


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"strategy": "no_shard"}])
def test_a_gradient_that_is_kept_stays_where_others_of_its_unit_are_added_to(
    options: dict[str, Any],
) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        kept = []
        for each in (model, twin):
            loss = each(IDS).square().sum()
            each.zero_grad()
            loss.backward(retain_graph=True)
            dropped = [p for name, p in each.named_parameters() if name.endswith("weight")]
            held = [p.grad for p in dropped]
            for p in dropped:
                p.grad = None
            (3 * loss).backward()
            kept.append(held + [p.grad for p in each.parameters()])
        assert_same(*kept)

    with_sharded(body, **options)


def zeroed(model: Tied) -> None:
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None for p in model.parameters())
    model(IDS).square().sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.zero_()
    model(IDS).square().sum().backward()


def thawed(model: Tied) -> None:
    for on in (False, True):
        model.zero_grad()
        loss = model(IDS).square().sum()
        model.embed.requires_grad_(on)
        loss.backward()
        model(IDS).square().sum().backward()


def hooked(model: Tied) -> None:
    model.zero_grad()
    model.blocks[1].register_full_backward_hook(lambda module, grads, _: (2 * grads[0],))
    model.blocks[0].register_full_backward_pre_hook(lambda module, grads: (3 * grads[0],))
    model(IDS).square().sum().backward()


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("loop", [zeroed, thawed, hooked])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_gradients_are_those_without_sharding(loop: Callable[[Tied], None], strategy: str) -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        loop(model)
        loop(twin)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
        for optimizer in optimizers:
            optimizer.step()
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name])

    with_sharded(body, strategy=strategy)


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_a_gradients_data_that_was_replaced_is_added_to(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        fully_shard(model, comm, strategy=strategy)
        x = torch.ones(1, WIDTH)
        for _ in range(2):
            model(x).sum().backward()
            assert model.weight.grad is not None
            model.weight.grad.data = torch.full_like(model.weight.grad.data, 5.0)
        model(x).sum().backward()
        assert model.weight.grad is not None
        assert local(model.weight.grad).eq(6.0).all()
        model.zero_grad()
        model(x).sum().backward()
        assert model.weight.grad is not None
        assert local(model.weight.grad).eq(1.0).all()

    run_threads(body, RANKS)


def test_a_models_state_dict_is_that_of_its_engine() -> None:
    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        of_model, of_engine = model.state_dict(), engine.state_dict()
        assert of_model.keys() == of_engine.keys() == twin.state_dict().keys()
        for name, value in of_model.items():
            assert value.shape == twin.state_dict()[name].shape
            assert repr(value) == repr(of_engine[name])
        inner = model.blocks[0].state_dict(prefix="inner.")
        assert inner["inner.weight"].shape == (WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match=r"torch\.distributed\.checkpoint"):
            torch.save(of_model, io.BytesIO())

    with_sharded(body)


@pytest.mark.covers("state dicts")
@pytest.mark.parametrize("assign", [False, True])
def test_full_tensors_load_into_a_model(assign: bool) -> None:
    other = model_of(seed=1)

    def body(model: Tied, engine: Engine, twin: Tied) -> None:
        model(IDS)
        model.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(model(IDS), other(IDS))
        twin.load_state_dict(engine.full_state_dict())
        model.load_state_dict(model.state_dict(), assign=assign)
        model.blocks[0].load_state_dict(other.blocks[0].state_dict(), assign=assign)
        assert torch.equal(model(IDS), twin(IDS))
        with pytest.raises(RuntimeError, match=r"embed\.weight has shape \(4, 8\)"):
            model.load_state_dict({"embed.weight": torch.zeros(4, WIDTH)}, strict=False)

    with_sharded(body)


def saved_as_torch_does(folder: str) -> None:
    dist.init_process_group("gloo")
    with Communicator.from_process_group() as comm:
        model = model_of()
        fully_shard(model, comm, units=[nn.Linear, nn.Embedding])
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/own")
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/torch")
        other = model_of(seed=1)
        engine = fully_shard(other, comm, units=[nn.Embedding])
        state = other.state_dict()
        dcp.load({"model": state}, checkpoint_id=f"{folder}/own")
        other.load_state_dict(state)
        full = engine.full_state_dict()
        assert all(torch.equal(full[n], v) for n, v in model_of().state_dict().items())
        again = get_model_state_dict(model)
        dcp.load({"model": again}, checkpoint_id=f"{folder}/torch")
        set_model_state_dict(model, again)
        given = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        with pytest.raises(NotImplementedError, match="full_state_dict"):
            given["embed.weight"].sum()
    dist.destroy_process_group()


@pytest.mark.covers("checkpoints")
def test_torchs_checkpoint_tools_save_and_load_a_models_state_dict(tmp_path: Path) -> None:
    launch(saved_as_torch_does, RANKS, (str(tmp_path),), timeout_s=60)
    for name in ("own", "torch"):
        plain = model_of(seed=1)
        state = {"model": plain.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / name, no_dist=True)
        assert all(torch.equal(state["model"][n], v) for n, v in model_of().state_dict().items())


def test_a_parameter_that_another_engine_has_taken_over_is_trained_by_this_one() -> None:
    def body(comm: Communicator) -> None:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        for model in (first, second):
            fully_shard(model, comm)
        before = second.weight.full_tensor()  # type: ignore[operator]
        second(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(second.parameters(), lr=0.5).step()
        torch.testing.assert_close(second.weight.full_tensor(), before - 0.5)  # type: ignore[operator]

    run_threads(body, RANKS)
