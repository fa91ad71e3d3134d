"""When a unit's gradients are where: full ones on this rank, on their way, or shown as the `.grad` of its rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardcomm import Communicator, Engine, MixedPrecision, fully_shard
from shardcomm.sharded.unit_gradients import Stage
from support.called import Called
from support.thread_ranks import run_threads
from support.twins import WIDTH, Chain, assert_same_gradients, twins, values

RANKS = 2
LAYERS = 5


def chain() -> Chain:
    return Chain(layers=LAYERS)


def stages(engine: Engine) -> list[Stage]:
    return [unit.gradients.stage for unit in engine.units]


def test_a_units_gradients_are_shown_while_backward_goes_on() -> None:
    def body(comm: Communicator) -> None:
        model, plain = twins(chain)
        engine = fully_shard(model, comm)
        seen: list[tuple[list[Stage], bool]] = []

        def look() -> None:
            last = model.blocks[-1].linear.weight.grad
            seen.append((stages(engine), last is not None))

        model.between = lambda i, x: Called.apply(x, look) if i == 0 else x
        assert stages(engine) == [Stage.EMPTY] * (LAYERS + 1)
        with engine.no_sync():
            model(values(3, WIDTH)).sum().backward()
        assert set(stages(engine)) == {Stage.LOCAL}
        model(values(3, WIDTH)).sum().backward()
        # The root's backward has begun, as has that of the blocks behind the first.
        assert seen[0] == ([Stage.LOCAL, Stage.EMPTY, *[Stage.LOCAL] * (LAYERS - 1)], False)
        of_units, last_is_shown = seen[1]
        assert of_units[:2] == [Stage.LOCAL] * 2
        assert of_units[-1] is Stage.READY
        assert last_is_shown
        assert set(stages(engine)) == {Stage.READY}
        for _ in range(2):
            plain(values(3, WIDTH)).sum().backward()
        assert_same_gradients(engine, model, plain)

    run_threads(body, RANKS)


@pytest.mark.parametrize("precision", [None, MixedPrecision(reduce_dtype=torch.bfloat16)])
def test_an_optimizer_in_backward_needs_memory_for_a_few_units_gradients(
    precision: MixedPrecision | None,
) -> None:
    """Those of a unit are stepped with and given back while units before it run their backward."""

    def body(comm: Communicator) -> None:
        model, _ = twins(chain)
        after, _ = twins(chain)
        engine = fully_shard(model, comm, mixed_precision=precision)
        reference = fully_shard(after, comm, mixed_precision=precision)
        whole = sum(bucket.shard.nbytes for unit in engine.units for bucket, _ in unit.buckets)
        largest = max(sum(b.shard.nbytes for b, _ in unit.buckets) for unit in engine.units)
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}
        held: list[int] = []

        def step(param: nn.Parameter) -> None:
            held.append(engine.footprint().gradient_bytes)
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        optimizer = torch.optim.AdamW(after.parameters(), lr=0.1)
        for seed in range(3):
            model(values(3, WIDTH, seed=seed)).sum().backward()
            after(values(3, WIDTH, seed=seed)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert max(held) <= 3 * largest < whole
        assert engine.footprint().gradient_bytes == 0
        ours, theirs = engine.full_state_dict(), reference.full_state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    run_threads(body, RANKS)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(Scale() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(scale(x) for scale in self.each)  # type: ignore[return-value]


def test_a_hook_is_not_given_part_of_a_gradient_as_all_of_it() -> None:
    """Raw inputs have no mark to tell the end of a unit's backward: another unit that needs its slot ends it."""

    def body(comm: Communicator) -> None:
        model, plain = twins(Scales)
        engine = fully_shard(model, comm, slots=1)
        x = values(3, WIDTH)

        def losses(net: nn.Module) -> torch.Tensor:
            return sum(net(x).square().sum() for _ in range(2))  # type: ignore[return-value]

        for net in (model, plain):
            with engine.no_sync():
                losses(net).backward()  # type: ignore[no-untyped-call]
            losses(net).backward()  # type: ignore[no-untyped-call]
        assert_same_gradients(engine, model, plain)

        model.zero_grad()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
        with engine.no_sync():
            losses(model).backward()  # type: ignore[no-untyped-call]
        loss = losses(model)
        with pytest.raises(RuntimeError, match="again after its gradients were given to hooks"):
            loss.backward()  # type: ignore[no-untyped-call]

    run_threads(body, RANKS)


def test_a_hook_returns_nothing_as_without_sharding() -> None:
    def body(comm: Communicator) -> None:
        sharded, plain = twins(chain)
        fully_shard(sharded, comm)
        for model in (sharded, plain):
            param = model.blocks[0].linear.bias
            param.register_post_accumulate_grad_hook(lambda p: p.grad * 0.5)
            with pytest.raises(RuntimeError, match="return None"):
                model(values(3, WIDTH)).sum().backward()

    run_threads(body, RANKS)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_backward_that_failed_shows_only_earlier_gradients_afterwards(earlier: bool) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(chain)
        engine = fully_shard(model, comm)
        if earlier:
            model(values(3, WIDTH)).sum().backward()
        shown: list[bool] = []

        def fail() -> None:
            shown.append(model.blocks[-1].linear.weight.grad is not None)
            raise LookupError

        model.between = lambda i, x: Called.apply(x, fail) if i == 0 else x
        with pytest.raises(LookupError):
            model(values(3, WIDTH)).sum().backward()
        assert shown == [True]
        model.between = lambda i, x: x
        with torch.no_grad():
            model(values(3, WIDTH))
        assert all((param.grad is not None) is earlier for param in model.parameters())
        assert set(stages(engine)) == {Stage.EMPTY}

    run_threads(body, RANKS)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_gradients_are_looked_at_before_any_is_shown(on_nonfinite: str) -> None:
    def body(comm: Communicator) -> None:
        model, _ = twins(chain)
        fully_shard(model, comm, on_nonfinite=on_nonfinite)  # type: ignore[arg-type]
        shown: list[bool] = []
        hooked: list[bool] = []
        model.between = lambda i, x: (
            Called.apply(x, lambda: shown.append(model.blocks[-1].linear.weight.grad is not None))
            if i == 0
            else x
        )
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda _: hooked.append(True))  # type: ignore[no-untyped-call]
        model(values(3, WIDTH)).sum().backward()
        assert shown == [False]
        assert len(hooked) == len(list(model.parameters()))

    run_threads(body, RANKS)
