"""An optimizer's own state dict, and torch's get_state_dict of it, against an optimizer of an unsharded model."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from shardcomm import Communicator, Engine, Mesh, Policy, fully_shard
from shardcomm.parameter.shard_tensor import ShardTensor
from support.optimizer_nets import (
    BY_ELEMENTS,
    GRANULARITIES,
    OPTIMIZERS,
    STEPS,
    Net,
    groups,
    train,
    unsharded,
)
from support.thread_ranks import run_mesh, run_threads
from support.twins import local, twins, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def assert_states_equal(state: dict[Any, Any], wanted: dict[Any, Any], model: nn.Module) -> None:
    """Of what is here; the rest is another rank's, whose the whole parameter is."""
    of_others = {key for key in wanted if key not in state}
    assert len(of_others) <= sum(param.numel() == 0 for param in model.parameters())
    for key, entries in state.items():
        for name, value in entries.items():
            if isinstance(value, ShardTensor):
                for rectangle, part in zip(value.rectangles, value.parts, strict=True):
                    torch.testing.assert_close(part, wanted[key][name][rectangle.slices])
            else:
                assert name in ("step", "mu_product")
                assert value == wanted[key][name]


def assert_weights_equal(engine: Engine, wanted: nn.Module) -> None:
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, wanted.state_dict()[name], msg=name)


@pytest.mark.covers("optimizer state")
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_moments_are_parts_of_whole_ones(name: str, granularity: Any) -> None:
    def body(comm: Communicator) -> list[int]:
        model, _ = twins(Net)
        fully_shard(model, comm, granularity=granularity)
        optimizer = OPTIMIZERS[name](model)
        plain, its_optimizer = unsharded(name, 0)
        # Torch makes a step of zeros here, on this rank also of parameters that another one owns.
        state = get_optimizer_state_dict(model, optimizer)["state"]
        wanted = get_optimizer_state_dict(plain, its_optimizer)["state"]
        assert state.keys() == wanted.keys()
        assert_states_equal(state, wanted, model)
        train(model, optimizer, range(STEPS))
        train(plain, its_optimizer, range(STEPS))
        state, wanted = optimizer.state_dict(), its_optimizer.state_dict()
        assert state["param_groups"] == wanted["param_groups"]
        assert_states_equal(state["state"], wanted["state"], model)
        return [
            sum(part.numel() for value in entries.values() for part in getattr(value, "parts", ()))
            for _, entries in sorted(state["state"].items())
        ]

    held = run_threads(body, 2)
    numel = sum(param.numel() for param in Net().parameters())
    moments = {"AdamW": 2, "amsgrad": 3, "SGD": 1, "NAdam": 2, "Adagrad": 1}[name]
    assert sum(map(sum, held)) == numel * moments  # all of it, once


@pytest.mark.covers("optimizer state")
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_a_snapshot_is_gone_back_to_bit_for_bit(name: str, granularity: Any) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        engine = fully_shard(model, comm, granularity=granularity)
        optimizer = OPTIMIZERS[name](model)
        train(model, optimizer, range(STEPS))
        best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        ends = []
        for again in (optimizer, optimizer, OPTIMIZERS[name](model)):
            weights, moments = copy.deepcopy(best)
            model.load_state_dict(weights)
            again.load_state_dict(moments)
            train(model, again, range(STEPS, 2 * STEPS))
            ends.append(engine.full_state_dict())
        for end in ends[1:]:
            assert all(torch.equal(end[key], ends[0][key]) for key in end)
        assert_weights_equal(engine, unsharded(name, 2 * STEPS)[0])

    run_threads(body, 2)


@pytest.mark.covers("optimizer state")
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_a_plain_optimizers_state_is_loaded(name: str, granularity: Any, *, stepped: bool) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        engine = fully_shard(model, comm, granularity=granularity)
        optimizer = OPTIMIZERS[name](model)
        if stepped:
            train(model, optimizer, range(1))
        plain, its_optimizer = unsharded(name, STEPS)
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(its_optimizer.state_dict())
        assert optimizer.param_groups[0]["lr"] == its_optimizer.param_groups[0]["lr"]
        train(model, optimizer, range(STEPS, 2 * STEPS))
        assert_weights_equal(engine, unsharded(name, 2 * STEPS)[0])

    run_threads(body, 2)


def assert_trains_and_goes_on(ranks: Communicator | Mesh, **options: Any) -> None:
    model, _ = twins(Net)
    engine = fully_shard(model, ranks, **options)
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer, range(STEPS))
    wanted = unsharded("AdamW", STEPS)[1].state_dict()
    assert_states_equal(optimizer.state_dict()["state"], wanted["state"], model)
    again = OPTIMIZERS["AdamW"](model)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, again, range(STEPS, 2 * STEPS))
    assert_weights_equal(engine, unsharded("AdamW", 2 * STEPS)[0])


@pytest.mark.covers("optimizer state")
def test_replicas_have_parts() -> None:
    run_mesh(lambda mesh: assert_trains_and_goes_on(mesh, strategy="hybrid_shard"), 2, 2)


@pytest.mark.covers("optimizer state", "CPU offload")
def test_shards_in_host_memory_have_parts() -> None:
    run_threads(lambda comm: assert_trains_and_goes_on(comm, cpu_offload=True), 2)


class History(torch.optim.Optimizer):
    """Has its state in lists of dicts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("past", []).append({"grad": param.grad.clone()})


def test_moments_in_lists_and_dicts_are_parts_too() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(8, 64, bias=False)
        fully_shard(model, comm)
        optimizer, plain = History(model.parameters()), nn.Linear(8, 64, bias=False)
        for net in (model, plain):
            net(values(4, 8)).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        assert saved["state"][0]["past"][0]["grad"].shape == (64, 8)
        loaded = {0: {"past": [{"grad": plain.weight.grad}]}}
        optimizer.load_state_dict({**saved, "state": loaded})
        torch.testing.assert_close(
            optimizer.state[model.weight]["past"][0]["grad"], model.weight.grad.to_local()
        )

    run_threads(body, 2)


def test_parameters_that_come_to_an_optimizer_later_have_parts() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Linear(8, 64)
        fully_shard(model, comm, ignored_params=[model.bias])
        optimizer = torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)
        optimizer.add_param_group({"params": [model.weight]})
        model(values(4, 8)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        assert type(state[0]["momentum_buffer"]) is torch.Tensor
        assert state[1]["momentum_buffer"].shape == (64, 8)

    run_threads(body, 2)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_optimizer_that_was_given_the_model_by_hand_loads_before_its_first_step(
    granularity: Any,
) -> None:
    """As Accelerate exchanges the parameters in an optimizer's groups."""

    def body(comm: Communicator) -> None:
        plain, its_optimizer = unsharded("AdamW", STEPS)
        model, _ = twins(Net)
        model.load_state_dict(plain.state_dict())
        optimizer = OPTIMIZERS["AdamW"](model)
        engine = fully_shard(model, comm, granularity=granularity)
        for group, theirs in zip(optimizer.param_groups, groups(model), strict=True):
            group["params"] = theirs["params"]
        optimizer.load_state_dict(copy.deepcopy(its_optimizer.state_dict()))
        train(model, optimizer, range(STEPS, 2 * STEPS))
        train(plain, its_optimizer, range(STEPS, 2 * STEPS))
        assert_weights_equal(engine, plain)

    run_threads(body, 2)


def test_a_copy_of_an_optimizer_has_parts() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        fully_shard(model, comm)
        optimizer = OPTIMIZERS["AdamW"](model)
        train(model, optimizer, range(STEPS))
        state, wanted = copy.copy(optimizer).state_dict(), optimizer.state_dict()
        assert repr(state["state"]) == repr(wanted["state"])
        assert "ShardTensor" in repr(state["state"])

    run_threads(body, 2)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_plain_optimizer_does_not_take_parts(granularity: Any) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Net)
        fully_shard(model, comm, granularity=granularity)
        optimizer = OPTIMIZERS["AdamW"](model)
        train(model, optimizer, range(STEPS))
        with pytest.raises(ValueError, match=r"this rank's part .* torch.distributed.checkpoint"):
            OPTIMIZERS["AdamW"](plain).load_state_dict(optimizer.state_dict())

    run_threads(body, 2)


class CountingInVectors(torch.optim.AdamW):
    """Has the number of its steps in a tensor of one element, with a dim."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["moment"] = state.get("moment", 0) + param.grad
                    state["step"] = state.get("step", torch.zeros(1)) + 1


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_numbers_may_have_a_dim(granularity: Any, ranks: int) -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(Net)
        fully_shard(model, comm, granularity=granularity)
        optimizers = [CountingInVectors(net.parameters()) for net in (model, plain)]
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            train(net, optimizer, range(STEPS))
        state, wanted = (optimizer.state_dict() for optimizer in optimizers)
        for key, entries in state["state"].items():
            held = {n: v for n, v in entries.items() if getattr(v, "rectangles", (1,))}
            assert_states_equal({key: held}, {key: wanted["state"][key]}, plain)
            assert all(v.shape == wanted["state"][key][n].shape for n, v in entries.items())
        again = CountingInVectors(model.parameters())
        again.load_state_dict(wanted)
        for param, theirs in zip(model.parameters(), wanted["state"].values(), strict=True):
            assert again.state[param]["step"] == theirs["step"]
            assert again.state[param]["moment"].shape == local(param).shape

    run_threads(body, ranks)


def test_a_loaded_state_dict_is_not_copied() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        fully_shard(model, comm)
        optimizer = OPTIMIZERS["AdamW"](model)
        train(model, optimizer, range(1))
        moments = optimizer.state[model.up.weight]["exp_avg"]
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state[model.up.weight]["exp_avg"].data_ptr() == moments.data_ptr()

    run_threads(body, 2)


def test_parameters_that_are_not_sharded_have_plain_states() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        engine = fully_shard(model, comm, ignored_params=[model.few])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        train(model, optimizer, range(STEPS))
        plain, _ = twins(Net)
        reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
        train(plain, reference, range(STEPS))
        for state in (
            get_optimizer_state_dict(model, optimizer),
            engine.optimizer_state(optimizer).state_dict(),
        ):
            few, down = (state["state"][name]["exp_avg"] for name in ("few", "down.weight"))
            torch.testing.assert_close(few, reference.state[plain.few]["exp_avg"])
            assert type(few) is torch.Tensor
            assert type(down) is ShardTensor
        engine.optimizer_state(optimizer).load_state_dict(
            get_optimizer_state_dict(plain, reference)
        )

    run_threads(body, 2)


@pytest.mark.parametrize("options", [{"strategy": "no_shard"}, {}])
def test_who_has_the_whole_model_has_a_plain_state_dict(options: dict[str, Any]) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        fully_shard(model, comm, **options)
        optimizer = OPTIMIZERS["AdamW"](model)
        train(model, optimizer, range(STEPS))
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file)["state"]
        for key, entries in unsharded("AdamW", STEPS)[1].state_dict()["state"].items():
            torch.testing.assert_close(loaded[key], entries)

    run_threads(body, 2 if options else 1)


@pytest.mark.covers("optimizer state", "expert meshes")
def test_experts_of_one_rank_are_in_the_state_dict_as_wholes() -> None:
    def body(comm: Communicator) -> None:
        expert = nn.Linear(4, 3)
        model = nn.Sequential(nn.Linear(5, 4))
        model.add_module(f"expert{comm.rank}", expert)
        alone = Communicator.local_group(1)[0]
        fully_shard(model, comm, units={expert: Policy(comm=alone)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(2, 5)).sum().backward()
        optimizer.step()
        value = get_optimizer_state_dict(model, optimizer)["state"][f"expert{comm.rank}.weight"]
        assert [part.shape for part in value["momentum_buffer"].parts] == [(3, 4)]

    run_threads(body, 2)


def test_experts_that_ranks_call_by_one_name_are_refused() -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        alone = Communicator.local_group(1)[0]
        fully_shard(model, comm, units={model.down: Policy(comm=alone)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, range(1))
        for state_dict in (
            optimizer.state_dict,
            partial(get_optimizer_state_dict, model, optimizer),
        ):
            with pytest.raises(
                RuntimeError,
                match=r"optimizer.state_dict: 'down.weight' means different parameters on",
            ):
                state_dict()

    run_threads(body, 2)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_torchs_functions_go_back_to_what_they_gave(name: str, granularity: Any) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        engine = fully_shard(model, comm, granularity=granularity)
        optimizer = OPTIMIZERS[name](model)
        train(model, optimizer, range(STEPS))
        weights, moments = copy.deepcopy(get_state_dict(model, optimizer))
        train(model, optimizer, range(2))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        train(model, optimizer, range(STEPS, 2 * STEPS))
        assert_weights_equal(engine, unsharded(name, 2 * STEPS)[0])

    run_threads(body, 2)


class MeanOfRows(torch.optim.Optimizer):
    """Keeps a mean over the rows that it sees."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["mean"] = torch.zeros(param.shape[1:])


def test_what_is_no_state_of_the_whole_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model, columns = (nn.Linear(8, 64, bias=False) for _ in range(2))
        fully_shard(model, comm)
        fully_shard(columns, comm, shard_dim=1)
        good = torch.optim.AdamW([nn.Parameter(torch.zeros(64, 8))]).state_dict()
        for stepped in (False, True):
            optimizer = torch.optim.AdamW(model.parameters())
            if stepped:
                model(values(4, 8)).sum().backward()
                optimizer.step()
            for wrong, said in [
                (torch.zeros(32, 8), r"'exp_avg' of 'weight' has shape \(32, 8\); the model's is "),
                (torch.zeros(9, 8), r"has shape \(9, 8\); the model's is \(64, 8\)"),
                (columns.state_dict()["weight"], r"this rank holds ShardTensor.* torch.distribute"),
            ]:
                state = {0: {"step": torch.tensor(1.0), "exp_avg": wrong, "exp_avg_sq": wrong}}
                with pytest.raises(ValueError, match=said):
                    optimizer.load_state_dict({**good, "state": state})
            with pytest.raises(ValueError, match="different number of parameter groups"):
                optimizer.load_state_dict({"state": {}, "param_groups": []})
        full = StateDictOptions(full_state_dict=True)
        for state in (
            optimizer.state_dict(),
            get_optimizer_state_dict(model, optimizer, options=full),
        ):
            with pytest.raises(RuntimeError, match=r"cannot be pickled, as by torch.save: it is "):
                torch.save(state, io.BytesIO())
        means = MeanOfRows(model.parameters())
        means.step()
        with pytest.raises(ValueError, match=r"'mean' of 'weight' has shape \(8,\), this rank's "):
            means.state_dict()

    run_threads(body, 2)


@pytest.mark.parametrize("granularity", ["row", "element"])
def test_a_wrong_moment_is_refused_also_where_a_rank_happens_to_have_all_rows(
    granularity: Any,
) -> None:
    """Else that rank would train on, and wait for the one that has none."""
    good = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).state_dict()

    def body(comm: Communicator) -> bool:
        model = nn.Linear(8, 1, bias=False) if granularity == "row" else nn.Linear(1, 1, bias=False)
        fully_shard(model, comm, granularity=granularity)
        optimizer = torch.optim.AdamW(model.parameters())
        wrong = torch.zeros(3, 8)
        state = {0: {"step": torch.tensor(1.0), "exp_avg": wrong, "exp_avg_sq": wrong}}
        with pytest.raises(ValueError, match=r"'exp_avg' of 'weight' has shape \(3, 8\)"):
            optimizer.load_state_dict({**good, "state": state})
        return model.weight.to_local().numel() > 0  # type: ignore[operator]

    assert sorted(run_threads(body, 2)) == [False, True]


def test_an_optimizer_that_is_given_the_model_later_is_told_at_its_first_step() -> None:
    """As Accelerate exchanges the parameters in an optimizer's groups."""

    def body(comm: Communicator) -> None:
        model, _ = twins(Net)
        optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        fully_shard(model, comm)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        train(model, optimizer, range(1))
        shapes = [p.shape for p in Net().parameters()]
        state = optimizer.state_dict()["state"]
        assert [state[i]["exp_avg"].shape for i in range(len(shapes))] == shapes

    run_threads(body, 2)
