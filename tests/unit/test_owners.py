"""Owners of whole parameters: balanced over a model, and exact in training, state dicts and plans."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardcomm import CommError, Communicator, MemoryPlan, Mesh, MixedPrecision, fully_shard, launch
from shardcomm.layout.param_spec import Granularity
from shardcomm.models.shapes import SHAPES, ModelShapes
from shardcomm.unit.owners import choose_owners
from support.nets import STEPS, Block, assert_same, batch, loss_of, make, reference, sgd_of, train
from support.thread_ranks import run_mesh, run_threads
from support.twins import local

HIDDEN, FEED_FORWARD, KEYS, WORDS = 2048, 5632, 256, 32000
LLAMA_1B = ModelShapes(
    block={
        "q.weight": (HIDDEN, HIDDEN),
        "k.weight": (KEYS, HIDDEN),
        "v.weight": (KEYS, HIDDEN),
        "o.weight": (HIDDEN, HIDDEN),
        "gate.weight": (FEED_FORWARD, HIDDEN),
        "up.weight": (FEED_FORWARD, HIDDEN),
        "down.weight": (HIDDEN, FEED_FORWARD),
        "norm_1.weight": (HIDDEN,),
        "norm_2.weight": (HIDDEN,),
    },
    layers=22,
    rest={
        "embed.weight": (WORDS, HIDDEN),
        "head.weight": (WORDS, HIDDEN),
        "norm.weight": (HIDDEN,),
    },
)
MODELS = {"gpt2": SHAPES["gpt2"], "llama-1.1b": LLAMA_1B}


def loads(costs: list[int], owners: list[int] | tuple[int, ...], ranks: int) -> list[int]:
    held = [0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        held[owner] += cost
    return held


@given(st.lists(st.integers(0, 50), max_size=7), st.integers(1, 3))
def test_no_rank_gets_more_than_four_thirds_of_the_best_choice(
    costs: list[int], ranks: int
) -> None:
    owners = choose_owners(costs, ranks)
    assert all(0 <= owner < ranks for owner in owners)
    everything = itertools.product(range(ranks), repeat=len(costs))
    best = min(max(loads(costs, choice, ranks)) for choice in everything)
    assert max(loads(costs, owners, ranks)) <= 4 / 3 * best


def test_the_drawing_in_the_docstring() -> None:
    costs = [7, 5, 4, 4, 3, 1]
    assert choose_owners(costs, 2) == [0, 1, 1, 0, 1, 0]
    assert loads(costs, [0, 1, 1, 0, 1, 0], 2) == [12, 12]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_hold_about_as_much_of_a_model(name: str, ranks: int) -> None:
    shapes = MODELS[name]
    plan = MemoryPlan.of(shapes.on_meta(), ranks, granularity="tensor")
    largest = max(map(math.prod, (*shapes.block.values(), *shapes.rest.values())))
    # A rank has at least the largest tensor, and one more beside it where that is below the mean.
    assert plan.imbalance <= max(1.1, 1.001 * largest * ranks / shapes.numel)
    assert plan.footprint.padding_bytes == 0  # all sizes are multiples of the alignment
    assert sum(plan.shard_bytes) == plan.total_parameter_bytes == 4 * shapes.numel
    assert max(plan.shard_bytes) == plan.shard_bytes[plan.rank] == plan.footprint.parameter_bytes


def test_a_plan_draws_what_each_rank_holds() -> None:
    plan = MemoryPlan.of(make(width=8), 3, granularity="tensor")
    text = repr(plan)
    assert f"of rank {plan.rank}, which holds the most:" in text
    assert f"parameters of the ranks; the most by the mean: {plan.imbalance:.3f}" in text
    lines = [line for line in text.splitlines() if line.startswith("  rank ")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2"]
    assert lines[plan.rank].count("#") == 40 == max(line.count("#") for line in lines)
    assert plan.as_json()["shard_bytes"] == list(plan.shard_bytes)
    assert "which holds the most" not in repr(MemoryPlan.of(make(width=8), 3))
    many = repr(MemoryPlan.of(make(width=8), 40, granularity="tensor"))
    assert "... 24 ranks that hold less" in many
    with pytest.raises(ValueError, match="rank is 3; it must be None or one of the 3 that hold"):
        MemoryPlan.of(make(), 3, rank=3)


def matrices_whole(name: str, param: nn.Parameter) -> Granularity:
    return "tensor" if param.dim() > 1 else "row"


GRANULARITIES = {"tensor": "tensor", "matrices": matrices_whole}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"cpu_offload": True},
    "no slots": {"prefetch": 0, "slots": 1},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "dims": {"shard_dim": -1},
}


@pytest.mark.covers("owners", "training parity")
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("variant", ["", "nested", "frozen", "tied-across-units"])
def test_training_with_owners_equals_unsharded(
    variant: str, options: str, granularity: str
) -> None:
    expected = reference(make(variant), 2)

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        given = {"granularity": GRANULARITIES[granularity], "units": Block, **OPTIONS[options]}
        return train(comm, make(variant), **given)

    # What is cut along a last dim is gathered with other strides, with which some CPUs' BLAS sums in another order.
    for state in run_threads(body, 2):
        assert_same(state, expected, bitwise=options != "dims")


def test_what_is_cut_is_cut_evenly_beside_what_is_not() -> None:
    def body(comm: Communicator) -> list[tuple[set[Any], bool]]:
        engine = fully_shard(make(), comm, granularity=matrices_whole)
        layouts = [bucket.layout for unit in engine.units for bucket, _ in unit.buckets]
        return [
            ({p.spec.granularity for p in layout.placements}, layout.counts is None)
            for layout in layouts
        ]

    for buckets in run_threads(body, 3):
        assert [len(kinds) for kinds, _ in buckets] == [1] * len(buckets)
        assert all(equal for kinds, equal in buckets if kinds == {"row"})
        assert {"row", "tensor"} == set().union(*(kinds for kinds, _ in buckets))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("ranks", [3, 9])
def test_ranks_without_any_parameter_of_a_unit_take_part(ranks: int, granularity: str) -> None:
    """Of 9 ranks some have nothing of the whole model."""
    expected = reference(make(layers=1), ranks, optimizer_of=sgd_of)

    def body(comm: Communicator) -> tuple[dict[str, torch.Tensor], list[int]]:
        model = make(layers=1)
        engine = fully_shard(model, comm, granularity=GRANULARITIES[granularity])  # type: ignore[arg-type]
        optimizer = sgd_of(model)
        for step in range(STEPS):
            loss_of(model, batch(comm.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        held = [bucket.shard.numel() for unit in engine.units for bucket, _ in unit.buckets]
        return engine.full_state_dict(), held

    results = run_threads(body, ranks)
    assert any(0 in held for _, held in results)
    for state, _ in results:
        assert_same(state, expected, bitwise=False)


def over_a_transport(transport: str, offload: bool) -> None:
    with Communicator.from_env(transport=transport, deadline_s=30) as comm:  # type: ignore[arg-type]
        half = MixedPrecision(torch.bfloat16, torch.float32)
        plain = make()
        engine = fully_shard(
            plain, comm, granularity="tensor", mixed_precision=half, cpu_offload=offload
        )
        rows = make()
        by_rows = fully_shard(rows, comm, mixed_precision=half)
        for model in (plain, rows):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(3):
                with model_of(model, engine, by_rows).no_sync():
                    loss_of(model, batch(comm.rank, 2 * step)).backward()
                loss_of(model, batch(comm.rank, 2 * step + 1)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        state, expected = engine.full_state_dict(), by_rows.full_state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)
        engine.load_state_dict(expected)
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, expected[name]), name


def model_of(model: nn.Module, *engines: Any) -> Any:
    """The engine of `model`."""
    return next(engine for engine in engines if engine.model is model)


@pytest.mark.covers("owners", "CPU offload")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_owners_train_as_rows_do_over_processes(transport: str, offload: bool) -> None:
    launch(over_a_transport, 3, (transport, offload), timeout_s=100)


@pytest.mark.covers("owners", "training parity")
def test_replicas_of_owners_equal_unsharded() -> None:
    expected = reference(make(), 4, optimizer_of=sgd_of)

    def body(mesh: Mesh) -> dict[str, torch.Tensor]:
        return train(
            mesh, make(), optimizer_of=sgd_of, strategy="hybrid_shard", granularity="tensor"
        )

    for state in run_mesh(body, 2, 2):
        assert_same(state, expected, bitwise=False)


@pytest.mark.covers("owners", "optimizers")
def test_muon_on_matrices_with_owners_is_exact() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(5)))
    nets = [copy.deepcopy(plain) for _ in range(3)]
    x = torch.linspace(-1, 1, 24).view(2, 12)

    def steps(model: nn.Module) -> None:
        optimizer = torch.optim.Muon(model.parameters(), lr=0.05)
        for step in range(5):
            model(x + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(plain)

    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = nets[comm.rank]
        engine = fully_shard(model, comm, units=nn.Linear, granularity="tensor")
        steps(model)
        return engine.full_state_dict()

    for state in run_threads(body, 3):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def test_owners_follow_a_given_cost() -> None:
    """One matrix costs as much as all others together: its rank has nothing else."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))

    def cost(name: str, param: nn.Parameter) -> float:
        return 4.0 if name == "2.weight" else 1

    def body(comm: Communicator) -> list[str]:
        mine = copy.deepcopy(model)
        fully_shard(mine, comm, units=nn.Linear, granularity="tensor", owner_cost=cost)
        return [name for name, param in mine.named_parameters() if local(param).numel()]

    held = run_threads(body, 2)
    assert held == [["2.weight"], ["0.weight", "1.weight", "3.weight", "4.weight"]]
    plan = MemoryPlan.of(model, 2, units=nn.Linear, granularity="tensor", owner_cost=cost)
    assert (plan.rank, plan.shard_bytes) == (1, (256, 1024))


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "7", None])
def test_costs_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"owner_cost of parameter 'embed.weight' is .*; it must be"
    ):
        MemoryPlan.of(make(), 2, granularity="tensor", owner_cost=lambda *_: value)


def test_a_cost_may_be_a_number_of_numpy() -> None:
    plan = MemoryPlan.of(
        make(), 2, granularity="tensor", owner_cost=lambda _, param: np.prod(param.shape)
    )
    assert plan.shard_bytes == MemoryPlan.of(make(), 2, granularity="tensor").shard_bytes


def test_a_cost_without_owners_is_refused() -> None:
    with pytest.raises(ValueError, match=r"owner_cost is given, .* granularity=\"tensor\" too"):
        MemoryPlan.of(make(), 2, owner_cost=lambda *_: 1)


@pytest.mark.covers("ranks that differ")
def test_ranks_that_choose_other_owners_are_told() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(
            CommError, match=r"ranks differ: parameter .* has shard_numels .* on rank"
        ):
            fully_shard(
                make(),
                comm,
                granularity="tensor",
                owner_cost=lambda name, param: param.numel() if comm.rank else len(name) % 5,
            )

    run_threads(body, 2)


def test_parameters_of_other_dtypes_have_owners_and_are_gathered_whole() -> None:
    """A dtype that the core does not compute with travels as bytes, and so do its counts."""

    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            codes = torch.arange(300, dtype=torch.int16)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.more = nn.Parameter(codes[:7].clone(), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * self.codes.sum() + self.more.sum()

    def body(comm: Communicator) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        model = Codes()
        engine = fully_shard(model, comm, granularity="tensor")
        out = model(torch.ones(3)).detach()
        return out, engine.full_state_dict(), model.codes.full_tensor()  # type: ignore[operator]

    expected = Codes()
    for out, state, whole in run_threads(body, 2):
        assert torch.equal(out, expected(torch.ones(3)).detach())
        assert torch.equal(whole, expected.codes)
        for name, value in expected.state_dict().items():
            assert torch.equal(state[name], value), name
