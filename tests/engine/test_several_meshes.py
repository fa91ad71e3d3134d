"""Units over ranks of their own beside the rest, and units of several buckets: what they share, and in which order."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shardcomm import CommError, Communicator, MemoryPlan, Mesh, Policy, fully_shard, launch
from shardcomm.parameter.plain import grad_of, plain
from support.generator import seeded
from support.thread_ranks import run_mesh, run_threads

WIDTH = 64


def given(seed: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def whole(param: nn.Parameter) -> torch.Tensor:
    grad = param.grad
    assert grad is not None
    gathered: torch.Tensor = getattr(grad, "full_tensor", lambda: grad)()
    return gathered


class Mixed(nn.Module):
    """Parameters of several kinds, each of which is a bucket of the unit."""

    def __init__(self, kinds: list[tuple[torch.dtype, bool]]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(WIDTH, WIDTH, generator=generator) / 8 for _ in kinds]
        self.weights = nn.ParameterList(
            nn.Parameter(value.to(dtype), requires_grad=trained)
            for value, (dtype, trained) in zip(values, kinds, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight.float())
        return x


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.covers("mixed precision")
@pytest.mark.parametrize(
    "kinds",
    [
        [(F32, True), (BF16, True)],
        [(F32, True), (BF16, True), (F16, True)],
        [(F32, True), (F32, False), (BF16, True)],
        [(F32, True), (F32, False), (BF16, True), (F16, True)],
    ],
    ids=["two", "three", "one frozen", "four, one frozen"],
)
def test_replicas_reduce_every_bucket_of_a_unit(kinds: list[tuple[torch.dtype, bool]]) -> None:
    """All are reduced before the first is all-reduced, so each needs a staging buffer of its own."""
    plain = nn.Sequential(Mixed(kinds), Mixed(kinds))
    for rank in range(2):
        (plain(given(rank)).square().mean() / 2).backward()

    def rank_main(comm: Communicator) -> None:
        model = nn.Sequential(Mixed(kinds), Mixed(kinds))
        fully_shard(model, comm, units=Mixed, strategy="no_shard")
        model(given(comm.rank)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(whole(ours), theirs.grad, rtol=2e-2, atol=1e-5)

    run_threads(rank_main, 2)


class Adapted(nn.Module):
    """A frozen base, a scale that is cut into rows, and an adapter that one rank owns."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.randn(WIDTH, generator=generator))
        self.base = nn.Parameter(
            torch.randn(WIDTH, WIDTH, generator=generator), requires_grad=False
        )
        self.lora = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale @ self.base / 8) @ self.lora / 8


@pytest.mark.covers("frozen and tied parameters", "granularity")
def test_hybrid_shard_of_an_adapter_beside_a_frozen_base() -> None:
    plain = nn.Sequential(Adapted())
    for rank in range(4):
        (plain(given(rank)).square().mean() / 4).backward()

    def rank_main(mesh: Mesh) -> None:
        model = nn.Sequential(Adapted())
        fully_shard(
            model,
            mesh,
            units=Adapted,
            strategy="hybrid_shard",
            granularity=lambda name, _: "tensor" if "lora" in name else "row",
        )
        model(given(mesh.rank)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(whole(ours), theirs.grad)

    run_mesh(rank_main, 2, 2)


def linears(count: int, width: int) -> nn.Sequential:
    with seeded():
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def offload_over_two_meshes(own_ranks: bool) -> None:
    comm = Communicator.from_env()
    own = Communicator.from_env()
    policy = Policy(comm=own) if own_ranks else Policy(strategy="no_shard")
    width = 700  # so that copies take a while
    model, plain = linears(6, width), linears(6, width)
    units = {module: policy if i % 2 else None for i, module in enumerate(model)}
    fully_shard(model, comm, units=units, cpu_offload=True, prefetch=2)
    for step in range(3):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(step))
        for each in (model, plain):
            each.zero_grad()
            each(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None
            torch.testing.assert_close(whole(ours), theirs.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.covers("CPU offload")
@pytest.mark.parametrize("own_ranks", [False, True], ids=["no_shard", "own ranks"])
def test_offloaded_shards_of_two_meshes_do_not_meet(own_ranks: bool) -> None:
    launch(offload_over_two_meshes, 2, (own_ranks,), timeout_s=100)


class Skipping(nn.Module):
    """A layer, and experts of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.first = nn.Linear(WIDTH, WIDTH)
            self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        x = self.first(x)
        for name in use:
            x = self.experts[name](x)
        return x


@pytest.mark.covers("expert meshes")
@pytest.mark.parametrize("left", ["a", "b", ""])
def test_experts_that_one_rank_leaves_out_are_reduced_in_one_order(left: str) -> None:
    pairs = [Communicator.local_group(2, deadline_s=20) for _ in range(2)]

    def rank_main(comm: Communicator) -> dict[str, torch.Tensor]:
        model = Skipping()
        own = Policy(comm=pairs[comm.rank % 2][comm.rank // 2], strategy="no_shard")
        fully_shard(model, comm, units=dict.fromkeys(model.experts.values(), own))
        model(given(comm.rank), left if comm.rank == 2 else "ab").sum().backward()
        return {name: whole(param) for name, param in model.experts.named_parameters()}

    got = run_threads(rank_main, 4, deadline_s=20)

    for pair in (0, 1):  # ranks `pair` and `pair + 2` have the same experts
        plain = Skipping()
        for rank in range(4):
            if rank % 2 == pair:
                (plain(given(rank), left if rank == 2 else "ab").sum() / 4).backward()
        for rank in (pair, pair + 2):
            for name, param in plain.experts.named_parameters():
                expected = torch.zeros_like(param) if param.grad is None else param.grad
                torch.testing.assert_close(got[rank][name], expected)


@pytest.mark.covers("expert meshes")
def test_an_expert_of_all_ranks_may_be_left_out_on_one() -> None:
    own = Communicator.local_group(2, deadline_s=20)

    def rank_main(comm: Communicator) -> torch.Tensor:
        model = Skipping()
        policy = Policy(comm=own[comm.rank], strategy="no_shard")
        fully_shard(model, comm, units={model.experts["a"]: policy})
        model(given(comm.rank), "ab" if comm.rank else "b").sum().backward()
        return whole(model.experts["a"].weight)

    first, second = run_threads(rank_main, 2, deadline_s=20)
    plain = Skipping()
    (plain(given(1), "ab").sum() / 2).backward()
    assert plain.experts["a"].weight.grad is not None
    torch.testing.assert_close(first, plain.experts["a"].weight.grad)
    torch.testing.assert_close(second, first)


def test_what_is_left_out_on_a_rank_is_reduced_at_the_end_in_the_plan_too() -> None:
    own = Communicator.local_group(2)[0]
    units = {nn.Linear: Policy(comm=own, strategy="no_shard")}
    schedule = MemoryPlan.of(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 4, units=units
    ).schedule
    (end,) = [trigger for trigger in schedule.triggers() if trigger.unit < 0]
    reduced = [str(action) for action in schedule.actions[end] if action.verb.value == "reduce"]
    assert reduced == ["reduce 2", "reduce 1"]


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("on_nonfinite", [None, "skip"])
def test_sums_that_are_put_off_outlast_the_next_forward(on_nonfinite: str | None) -> None:
    """Also those of units without replicas, among others that have some."""

    def rank_main(comm: Communicator, all_reduces: bool) -> list[torch.Tensor]:
        model = linears(3, WIDTH)
        engine = fully_shard(
            model,
            comm,
            strategy="no_shard",
            units={model[1]: Policy(strategy="full_shard"), model[2]: None},
            on_nonfinite=on_nonfinite,  # type: ignore[arg-type]
        )
        for step in range(2):
            engine.set_requires_all_reduce(all_reduces or step == 1)
            model(given(step)).square().mean().backward()
        return [whole(param) for param in model.parameters()]

    at_once = run_threads(partial(rank_main, all_reduces=True), 2)
    put_off = run_threads(partial(rank_main, all_reduces=False), 2)
    for ours, theirs in zip(put_off, at_once, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)


class Experts(nn.Module):
    """A layer, and the experts of this rank alone."""

    def __init__(self, names: str) -> None:
        super().__init__()
        with seeded():
            self.first = nn.Linear(WIDTH, WIDTH)
            self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.stack([expert(x) for expert in self.experts.values()]).sum(0)


@pytest.mark.covers("expert meshes", "loss scaling, NaN and Inf")
@pytest.mark.parametrize("names", [("ab", "cd"), ("ab", "c")], ids=["as many", "fewer"])
def test_nonfinite_gradients_of_other_ranks_experts_are_named(names: tuple[str, str]) -> None:
    def rank_main(comm: Communicator) -> tuple[str, ...]:
        model = Experts(names[comm.rank])
        alone = Communicator.local_group(1)[0]
        units = dict.fromkeys(model.experts.values(), Policy(comm=alone))
        engine = fully_shard(model, comm, units=units, on_nonfinite="skip")
        model(given(comm.rank)).sum().backward()
        assert engine.nonfinite == ()
        x = given(comm.rank)
        (model(x).sum() * (torch.nan if comm.rank == 1 else 1.0)).backward()
        return engine.nonfinite

    for found in run_threads(rank_main, 2):
        assert {"experts.c", "(root)"} <= set(found)
        assert "experts.a" not in found


def test_a_unit_that_is_released_later_shares_the_reduce_buffer() -> None:
    model = linears(8, WIDTH)
    alike = MemoryPlan.of(model, 4, units={nn.Linear: None})
    kept = MemoryPlan.of(
        model, 4, units={nn.Linear: None, model[7]: Policy(strategy="shard_grad_op")}
    )
    assert kept.reduce_buffer_bytes == alike.reduce_buffer_bytes


@pytest.mark.covers("ranks that differ")
def test_units_that_one_rank_alone_does_not_have_are_told_to_all() -> None:
    class Special(nn.Linear):
        pass

    def rank_main(comm: Communicator) -> str:
        model = nn.Sequential(nn.Linear(4, 4), Special(4, 4) if comm.rank else nn.Linear(4, 4))
        with pytest.raises(
            (ValueError, CommError), match="units contains the class Special"
        ) as told:
            fully_shard(model, comm, units=Special)
        return type(told.value).__name__

    assert run_threads(rank_main, 2, deadline_s=20) == ["ValueError", "CommError"]


def test_a_forward_whose_loss_is_dropped_does_not_put_off_the_next_reduces() -> None:
    """Their full gradients would be there all at once."""

    def rank_main(comm: Communicator) -> list[int]:
        model = linears(6, WIDTH)
        engine = fully_shard(model, comm, units=nn.Linear)
        held = []

        def count(_param: nn.Parameter) -> None:
            full = [param.full for unit in engine.units for param in unit.params]
            with plain():
                held.append(sum(grad_of(each) is not None for each in full))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(count)
        model(given(0))
        model(given(0)).square().mean().backward()
        return held

    for held in run_threads(rank_main, 2):
        assert held
        assert max(held) <= 4  # of 12: the weight and the bias of two units


class Backwards(nn.Module):
    """Calls its layers in another order than that in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = linears(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


def test_a_rank_that_computes_once_more_reduces_in_the_order_of_the_others() -> None:
    def rank_main(comm: Communicator) -> None:
        model = Backwards()
        fully_shard(model, comm, units=nn.Linear, strategy="no_shard")
        x = given(comm.rank).requires_grad_()
        for step in range(3):
            if step == 1 and comm.rank == 0:
                model(x)  # a value for a log
            model(x).square().mean().backward()

    run_threads(rank_main, 2, deadline_s=20)


@pytest.mark.covers("odd forwards")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_graph_that_one_rank_keeps_does_not_change_the_order_of_reduces(strategy: str) -> None:
    def rank_main(comm: Communicator) -> None:
        model = Backwards()
        fully_shard(model, comm, units=nn.Linear, strategy=strategy)
        kept = []
        for step in range(3):
            x = given(step).requires_grad_()
            value = model(x)  # on every rank, for a log
            alone = model.body(x)
            if comm.rank == 0:
                kept += [value, alone]
            del value, alone
            model(x).square().mean().backward()

    run_threads(rank_main, 2, deadline_s=20)
