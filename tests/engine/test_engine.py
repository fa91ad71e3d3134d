"""The engine against plain PyTorch: one process that averages the ranks' gradients itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from shardcomm import (
    Bucket,
    CommError,
    Communicator,
    Engine,
    MixedPrecision,
    Policy,
    RowBlock,
    fully_shard,
)
from shardcomm.parameter.plain import grad_of, plain
from support.nets import (
    STEPS,
    Block,
    assert_same,
    batch,
    loss_of,
    make,
    optimizer_of,
    reference,
    train,
)
from support.thread_ranks import run_threads

VARIANTS = [
    "",
    "tied",
    "tied-across-units",
    "frozen",
    "unused",
    "skipped",
    "twice",
    "reversed",
    "checkpoint",
    "checkpoint-two",
    "checkpoint-reentrant",
]


def test_an_engine_tells_what_it_shards() -> None:
    alone = [Communicator.local_group(1)[0] for _ in range(2)]
    params = [*make(layers=6).parameters()]

    def body(comm: Communicator) -> list[str]:
        model = make(layers=6)
        policy = Policy(comm=alone[comm.rank])
        engine = fully_shard(model, comm, units={Block: None, model.blocks[5]: policy})
        comm.abort("nothing is asked of other ranks")
        held = engine.footprint()
        return [
            *repr(engine).splitlines(),
            f"parameter {held.parameter_bytes:,}, slot {held.slot_bytes:,}, ",
        ]

    for rank, (of, units, parameters, held, begin) in enumerate(run_threads(body, 2)):
        assert of == (
            f"Engine(full_shard of a Net over 1 x 2 ranks (replicas x shards), of which this is {rank}"
        )
        names = "(root), blocks.0, blocks.1, blocks.2, ... 2 more ..., blocks.5 (over 1)"
        assert units == f"  7 units: {names}"
        total = 4 * sum(param.numel() for param in params)
        assert parameters == f"  {len(params)} parameters of {total:,} bytes"
        assert held.startswith(f"  bytes of this rank: {begin}")


@pytest.mark.covers(
    "training parity", "frozen and tied parameters", "activation checkpointing", "odd forwards"
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_equals_data_parallel(variant: str, ranks: int) -> None:
    states = run_threads(lambda comm: train(comm, make(variant)), ranks)
    expected = reference(make(variant), ranks)
    for state in states:
        assert_same(state, expected, bitwise=True)


@pytest.mark.covers("prefetch and slots", "training parity")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize(("prefetch", "slots"), [(0, 1), (1, 2), (1, 3), (2, None), (9, None)])
def test_strategy_prefetch_and_slots_do_not_change_results(
    strategy: str, prefetch: int, slots: int | None
) -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        return train(comm, make(), strategy=strategy, prefetch=prefetch, slots=slots)

    expected = reference(make(), 2)
    for state in run_threads(body, 2):
        assert_same(state, expected, bitwise=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mixed_precision": torch.bfloat16},
            "torch.bfloat16; it must be a shardcomm.MixedPrecision, such as",
        ),
        ({"units": 3}, "units is 3; it must be a list of modules, module classes"),
        ({"units": nn.Conv2d}, "class Conv2d, of which the model has no module"),
        ({"units": [[nn.Linear]]}, "units contains list, which is not a module of the model"),
        ({"mixed_precision": False}, "mixed_precision is False; it must be"),
        ({"owner_cost": 3, "granularity": "tensor"}, "owner_cost is 3; it must be a function"),
        ({"granularity": RowBlock}, "granularity is <class .*RowBlock'>; accepted"),
        ({"strategy": ["full_shard"]}, r"strategy is \['full_shard'\]; accepted"),
        ({"prefetch": 1.5}, "prefetch is 1.5; it must be a whole number"),
        ({"slots": "2"}, "slots is '2'; it must be a whole number"),
    ],
)
def test_options_that_are_no_such_thing_are_named(options: dict[str, object], message: str) -> None:
    comm = Communicator.local_group(1)[0]
    with pytest.raises((ValueError, TypeError), match=message):
        fully_shard(make(), comm, **options)  # type: ignore[arg-type]


@pytest.mark.covers("odd forwards")
def test_nested_units() -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        return train(comm, make("nested"), units=Block)

    expected = reference(make("nested"), 2)
    for state in run_threads(body, 2):
        assert_same(state, expected, bitwise=True)


@pytest.mark.covers("granularity")
@pytest.mark.parametrize("granularity", ["element", "row", "tensor"])
def test_granularity_does_not_change_results(granularity: str) -> None:
    expected = reference(make(), 2)
    for state in run_threads(lambda comm: train(comm, make(), granularity=granularity), 2):
        assert_same(state, expected, bitwise=True)


def test_ranks_start_from_rank_0() -> None:
    states = run_threads(lambda comm: train(comm, make(seed=comm.rank)), 3)
    for state in states:
        assert_same(state, reference(make(seed=0), 3), bitwise=False)


@pytest.mark.covers("frozen and tied parameters")
def test_parameter_used_by_one_rank_only_counts_zeros_for_the_others() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
            self.extra = nn.Parameter(torch.ones(3))
            self.never = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, use_extra: bool) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](x))
            return x * self.extra if use_extra else x

    def body(comm: Communicator) -> tuple[torch.Tensor | None, bool]:
        model = Gate()
        engine = fully_shard(model, comm, granularity="tensor")
        model(torch.ones(1, 3), comm.rank == 1).sum().backward()
        owner = next(p for p in engine.units[0].params if p.name == "extra")
        with plain():  # as an optimizer sees them in its step
            state = {p.name: grad_of(p.shard) for u in engine.units for p in u.params}
            owns = owner.shard.shape == (3,)
        assert state["never"] is None
        return state["extra"], owns

    results = run_threads(body, 2)
    (grad,) = [grad for grad, owns in results if owns]
    assert grad is not None
    with plain():  # else it is the whole's, of which every rank must ask
        assert grad.abs().sum() > 0
    assert [grad for grad, owns in results if not owns] == [None]  # an optimizer passes it over


@pytest.mark.covers("gradient accumulation")
@pytest.mark.parametrize("sync_every", [True, False])
def test_gradient_accumulation_equals_the_large_batch(sync_every: bool) -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        engine = fully_shard(model, comm)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            if sync_every:
                loss_of(model, batch(comm.rank, 2 * step)).backward()
            else:
                with engine.no_sync():
                    loss_of(model, batch(comm.rank, 2 * step)).backward()
            loss_of(model, batch(comm.rank, 2 * step + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    expected = reference(make(), 2, micro=2)
    for state in run_threads(body, 2):
        assert_same(state, expected, bitwise=not sync_every)


@pytest.mark.covers("torch.func")
def test_gradients_of_inputs_and_evaluation_between_steps() -> None:
    def body(comm: Communicator) -> torch.Tensor:
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        with torch.no_grad():
            for i, param in enumerate(net.parameters()):
                param.copy_(torch.arange(param.numel()).view_as(param) * 0.01 + i)
        fully_shard(net, comm, units=nn.Linear)
        x = torch.ones(2, 4, requires_grad=True)
        out = net(x)
        with torch.no_grad():
            net(x)  # a second forward, before the backward of the first
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    expected = run_threads(body, 1)[0]
    for grad in run_threads(body, 2):
        assert torch.equal(grad, expected)


@pytest.mark.covers("odd forwards")
def test_several_forwards_before_their_backwards() -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make()
        engine = fully_shard(model, comm)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            losses = [loss_of(model, batch(comm.rank, 2 * step + m)) for m in range(2)]
            sum(losses).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return engine.full_state_dict()

    expected = reference(make(), 2, micro=2)
    for state in run_threads(body, 2):
        assert_same(state, expected, bitwise=False)


@pytest.mark.covers("gradient clipping")
def test_clip_grad_norm_equals_torch() -> None:
    def body(comm: Communicator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = make()
        engine = fully_shard(model, comm)
        loss_of(
            model, batch(0, 0)
        ).backward()  # the same batch on all ranks: the mean is one rank's
        norm = engine.clip_grad_norm_(0.1)
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.copy_(param.grad)
        return norm, engine.full_state_dict()

    model = make()
    loss_of(model, batch(0, 0)).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    grads = {name: param.grad for name, param in model.named_parameters()}
    for norm, state in run_threads(body, 3):
        torch.testing.assert_close(norm, expected)
        for name, grad in grads.items():
            torch.testing.assert_close(state[name], grad)


@pytest.mark.slow
def test_compiled_blocks() -> None:
    def body(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make(layers=2)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return train(comm, model)

    expected = reference(make(layers=2), 1)
    assert_same(run_threads(body, 1, deadline_s=300)[0], expected, bitwise=False)


@pytest.mark.covers("failed ranks")
def test_a_unit_skipped_by_one_rank_raises_on_all() -> None:
    def body(comm: Communicator) -> None:
        model = make("skipped" if comm.rank == 1 else "", layers=3)
        fully_shard(model, comm, prefetch=0)
        with pytest.raises(
            CommError,
            match=r"ranks called different collectives: .*unit 'blocks.2' #.*unit 'blocks.1'",
        ):
            loss_of(model, batch(comm.rank, 0)).backward()

    run_threads(body, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero3"}, "strategy is 'zero3'; accepted: 'full_shard'"),
        ({"units": [nn.Linear(1, 1)]}, "not a module of the model"),
        ({"prefetch": -1}, "prefetch"),
        ({"slots": 0}, "slots"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], message: str) -> None:
    comm = Communicator.local_group(1)[0]
    model = make()
    with pytest.raises(ValueError, match=message):
        fully_shard(model, comm, **options)  # type: ignore[arg-type]
    fully_shard(model, comm)  # the model is as it was


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_closed_model_computes_only_where_each_rank_has_all_of_it(strategy: str) -> None:
    def body(comm: Communicator) -> None:
        model, plain = make(), make()
        engine = fully_shard(model, comm, strategy=strategy)
        engine.close()
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        engine.close()  # again does nothing
        assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
        state = plain.state_dict()
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, state[name]), name
        tokens = batch(comm.rank, 0)
        if strategy == "no_shard":
            assert torch.equal(model(tokens), plain(tokens))
        else:
            with pytest.raises(RuntimeError, match="forward of a Net whose engine was closed: "):
                model(tokens)
            with pytest.raises(RuntimeError, match="forward of a Block whose engine was closed: "):
                model.blocks[0](torch.zeros(1))

    run_threads(body, 2)


def test_a_model_may_call_collectives_of_the_engines_communicator() -> None:
    """While the next unit's gather is under way, and its gradients' reduces."""

    class Calling(nn.Module):
        def __init__(self, comm: Communicator) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
            self.comm = comm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                x.register_hook(self.count)
                self.comm.broadcast(torch.ones(3))
            return x

        def count(self, _grad: torch.Tensor) -> None:
            ranks = torch.ones(3)
            self.comm.all_reduce(ranks)
            assert ranks.eq(self.comm.size).all()

    def body(comm: Communicator) -> None:
        model = Calling(comm)
        fully_shard(model, comm, units=[nn.Linear])
        for _ in range(20):
            model(torch.ones(4, 256)).sum().backward()

    run_threads(body, 2)


def test_sharding_twice_is_refused() -> None:
    comm = Communicator.local_group(1)[0]
    model = make()
    fully_shard(model, comm)
    with pytest.raises(ValueError, match="already"):
        fully_shard(model, comm)


def test_unit_that_needs_a_busy_slot_says_what_to_do() -> None:
    class Calls(nn.Module):
        """Calls a unit that is not its child while it is in use itself."""

        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.own = nn.Linear(2, 2)
            object.__setattr__(self, "other", other)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.other(x))

    other = nn.Linear(2, 2)
    model = nn.Sequential(Calls(other), other)
    engine = fully_shard(
        model,
        Communicator.local_group(1)[0],
        units=[*model],
        slots=1,
        prefetch=0,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),  # else nothing needs a slot
    )
    with pytest.raises(RuntimeError, match="slots=3"):
        model(torch.ones(1, 2))
    engine.close()


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("zero_grad", [True, False])
def test_a_closed_engine_and_its_memory_are_freed(zero_grad: bool, granularity: str) -> None:
    """Also where parameters still have their `.grad`, of which garbage collection does not know."""

    def body(comm: Communicator) -> tuple[weakref.ref[Engine], weakref.ref[Bucket]]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = fully_shard(model, comm, units=nn.Linear, granularity=granularity)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
        assert any(param.grad is not None for param in model.parameters())
        if zero_grad:
            model.zero_grad()
        engine.close()
        return weakref.ref(engine), weakref.ref(engine.units[1].buckets[0][0])

    freed = run_threads(body, 2)
    gc.collect()
    assert [(engine(), bucket()) for engine, bucket in freed] == [(None, None)] * 2
