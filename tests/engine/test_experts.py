"""Experts: units whose parameters some ranks alone have."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils import clip_grad_norm_

import shardcomm
from shardcomm import CommError, Communicator, Engine, Mesh, Policy, fully_shard, launch
from support.generator import seeded
from support.thread_ranks import run_mesh, run_threads
from support.twins import local

RANKS = 2
STEPS = 3


class Experts(nn.Module):
    """Experts of which each rank of a pair has its own half; tokens go to all of them, by an all-to-all of the pair.

    `exchange(x, experts)`: the outputs of all experts for `x`, wherever they are.
    """

    def __init__(self, width: int, numbers: range) -> None:
        super().__init__()
        self.each = nn.ModuleDict({str(n): nn.Linear(width, width) for n in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(x) for expert in self.each.values()])


class Mixture(nn.Module):
    def __init__(self, width: int, numbers: range) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        self.experts = Experts(width, numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        outputs = everywhere(self.experts, x)  # (experts, tokens, width)
        mixed: torch.Tensor = torch.einsum("te,etw->tw", weights, outputs)
        return x + mixed


EXPERTS = 4
WIDTH = 6


def everywhere(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """Outputs of all experts for this rank's tokens: here, or by the pair's exchange."""
    pair = _pair.get()
    if pair is None:
        out: torch.Tensor = experts(x)
        return out
    return _Returned.apply(pair, experts(_Sent.apply(pair, x)))  # type: ignore[no-any-return]


def _exchanged(pair: Communicator, x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().contiguous().view(-1)
    gathered = flat.new_empty(pair.size * flat.numel())
    pair.all_gather(gathered, flat)
    return gathered.view(pair.size, *x.shape)


class _Sent(torch.autograd.Function):
    """Tokens of both ranks of the pair, one after the other; the gradients of this rank's come back from both."""

    @staticmethod
    def forward(ctx, pair, x):  # type: ignore[no-untyped-def]
        ctx.pair = pair
        return _exchanged(pair, x).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        both = _exchanged(ctx.pair, grad.unflatten(0, (ctx.pair.size, -1)))
        return None, both[:, ctx.pair.rank].sum(0)


class _Returned(torch.autograd.Function):
    """Of all experts, the outputs for this rank's tokens; the gradients go back to where the experts are."""

    @staticmethod
    def forward(ctx, pair, y):  # type: ignore[no-untyped-def]
        ctx.pair = pair
        # (rank, expert, whose, tokens, width)
        both = _exchanged(pair, y.unflatten(1, (pair.size, -1)))
        return both[:, :, pair.rank].flatten(0, 1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        pair = ctx.pair
        # (whose, rank, expert, tokens, width)
        both = _exchanged(pair, grad.unflatten(0, (pair.size, -1)))
        return None, both[:, pair.rank].transpose(0, 1).flatten(1, 2)


_pair: contextvars.ContextVar[Communicator | None] = contextvars.ContextVar("pair", default=None)


def mixtures(numbers: range) -> nn.Sequential:
    """Two layers; the same values for an expert, whichever others are there."""
    with seeded():
        whole = nn.Sequential(*(Mixture(WIDTH, range(EXPERTS)) for _ in range(2)))
        part = nn.Sequential(*(Mixture(WIDTH, numbers) for _ in range(2)))
    with torch.no_grad():
        for name, param in part.named_parameters():
            param.copy_(whole.get_parameter(name))
    return part


def tokens_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.covers("expert meshes", "units that differ")
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_experts_over_two_of_four_ranks_train_as_unsharded(strategy: str, by_layer: bool) -> None:
    """Ranks 0 and 2 have experts 0 and 1, ranks 1 and 3 the others; the rest of the model is over all four."""
    whole = mixtures(range(EXPERTS))
    norms: list[torch.Tensor] = []
    maxima: list[torch.Tensor] = []
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.05)
    for step in range(STEPS):
        for rank in range(4):
            (whole(tokens_of(rank, step)).square().sum() / 4).backward()
        maxima.append(torch.stack([p.grad.abs().max() for p in whole.parameters()]).max())  # type: ignore[union-attr]
        norms.append(clip_grad_norm_(whole.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    expected = whole.state_dict()

    # Ranks 0 and 1, ranks 2 and 3; ranks 0 and 2, ranks 1 and 3.
    pairs, same = ([Communicator.local_group(2, deadline_s=20) for _ in range(2)] for _ in range(2))

    def body(comm: Communicator) -> None:
        rank = comm.rank
        pair, experts = pairs[rank // 2][rank % 2], same[rank % 2][rank // 2]
        _pair.set(pair)
        numbers = range(2 * (rank % 2), 2 * (rank % 2) + 2)
        model = mixtures(numbers)
        engine = fully_shard(
            model,
            comm,
            units={
                Mixture: None,
                Experts: Policy(comm=experts, strategy=strategy),
                **({nn.Linear: Policy(strategy=strategy)} if by_layer else {}),
            },
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(STEPS):
            model(tokens_of(rank, step)).square().sum().backward()
            largest = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None], math.inf
            )
            torch.testing.assert_close(largest + 0, maxima[step])
            clip = (
                engine.clip_grad_norm_
                if step == 0
                else partial(clip_grad_norm_, model.parameters())
            )
            torch.testing.assert_close(clip(1.0) + 0, norms[step])
            optimizer.step()
            optimizer.zero_grad()
        trained = engine.full_state_dict()
        assert list(trained) == list(expected)
        for name, value in trained.items():
            torch.testing.assert_close(value, expected[name], msg=name, rtol=1e-5, atol=1e-6)
        assert {name for name in engine.state_dict() if "each" in name} == {
            f"{layer}.experts.each.{n}.{kind}"
            for layer in range(2)
            for n in numbers
            for kind in ("weight", "bias")
        }
        engine.close()

    run_threads(body, 4)


class Counting(nn.Linear):
    """Has a buffer, and extra state."""

    def __init__(self, number: int, extra: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.tensor([number, 7]))
        self.extra = extra
        nn.init.constant_(self.weight, number)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def counting(numbers: range, extra: Callable[[int], Any] = torch.tensor) -> nn.Sequential:
    experts = {str(n): Counting(n, extra(n)) for n in numbers}
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleDict(experts), nn.Linear(WIDTH, WIDTH))


def over_pairs(model: nn.Sequential, comm: Communicator, pairs: Any) -> Engine:
    """Ranks 0 and 2 have the same experts, and so have ranks 1 and 3."""
    mine = Policy(comm=pairs[comm.rank % 2][comm.rank // 2])
    return fully_shard(model, comm, units={Counting: mine})


@pytest.mark.covers("expert meshes", "state dicts")
@pytest.mark.parametrize("rank", [None, 0, 3])
def test_a_full_state_dict_has_the_experts_of_all_ranks(rank: int | None) -> None:
    """Parameters, buffers and extra state, in the order of the whole model, which each rank loads its part of."""
    pairs = [Communicator.local_group(2, deadline_s=20) for _ in range(2)]

    def body(comm: Communicator) -> dict[str, Any]:
        mine = comm.rank % 2
        engine = over_pairs(counting(range(2 * mine, 2 * mine + 2)), comm, pairs)
        state = engine.full_state_dict(rank)
        expected = counting(range(EXPERTS)).state_dict()
        if rank not in (None, comm.rank):
            assert state == {}
        else:
            assert list(state) == list(expected)
            for name, value in expected.items():
                if not name.startswith(("0.", "2.")) and not name.endswith("bias"):
                    assert torch.equal(state[name], value), name
        given = {name: torch.full_like(v, n) for n, (name, v) in enumerate(expected.items())}
        engine.load_state_dict(given)
        for name, value in engine.full_state_dict().items():
            assert torch.equal(value, given[name]), name
        with pytest.raises(ValueError, match=r"has unknown \['1\.9\.weight'\]"):
            engine.load_state_dict({**given, "1.9.weight": torch.zeros(1)})
        return state

    run_threads(body, 4)


@pytest.mark.covers("expert meshes", "state dicts")
def test_a_full_state_dict_of_replicas_has_the_experts_of_all_ranks() -> None:
    """Each rank has one of four experts; the rest is replicated over rows of two."""
    alone = [Communicator.local_group(1)[0] for _ in range(4)]

    def body(mesh: Mesh) -> None:
        rank = mesh.rank
        units = {Counting: Policy(comm=alone[rank], strategy="full_shard")}
        engine = fully_shard(
            counting(range(rank, rank + 1)), mesh, units=units, strategy="hybrid_shard"
        )
        state = engine.full_state_dict()
        expected = counting(range(4)).state_dict()
        assert list(state) == list(expected)
        for n in range(4):
            name = f"1.{n}.weight"
            assert torch.equal(state[name], expected[name]), name

    run_mesh(body, 2, 2)


def test_extra_state_that_cannot_be_sent_is_refused_on_all_ranks() -> None:
    pairs = [Communicator.local_group(2, deadline_s=20) for _ in range(2)]

    def body(comm: Communicator) -> None:
        mine = comm.rank % 2
        model = counting(range(2 * mine, 2 * mine + 2), extra=lambda n: {"number": n})
        engine = over_pairs(model, comm, pairs)
        with pytest.raises(RuntimeError, match=r"'1\.0\._extra_state' is of a module that only"):
            engine.full_state_dict(0)

    run_threads(body, 4)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_other_parameters_of_the_same_name_are_not_saved_as_one(strategy: str) -> None:
    same = [Communicator.local_group(1)[0] for _ in range(2)]

    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(WIDTH, range(1)))
        policies = {Experts: Policy(comm=same[comm.rank])}
        engine = fully_shard(model, comm, units=policies, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters())
        for save in (
            engine.state_dict,
            model.state_dict,
            model[1].state_dict,
            engine.full_state_dict,
            partial(engine.full_state_dict, rank=1),
            partial(engine.optimizer_state, optimizer),
            shardcomm.ExponentialMovingAverage(engine).state_dict,
        ):
            with pytest.raises(
                RuntimeError, match=r"'1\.each\.0\.weight' and 1 more mean different param"
            ):
                save()
        with engine.gathered():
            assert dict(model.named_parameters())["1.each.0.weight"].shape == (WIDTH, WIDTH)
        # One expert a rank: nothing is gathered, and a norm is that of both all the same.
        for param in model.parameters():
            param.grad = torch.full_like(param, 2.0)
        numel = WIDTH * WIDTH + WIDTH
        norm = clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(norm + 0, torch.tensor(2.0 * math.sqrt(3 * numel)))
        torch.testing.assert_close(engine.clip_grad_norm_(1e9), norm + 0)
        # Tokens may have come to one rank's expert only.
        if comm.rank == 1:
            for param in model[1].parameters():
                param.grad = None
        norm = clip_grad_norm_(model.parameters(), 1e9)
        torch.testing.assert_close(norm, torch.tensor(2.0 * math.sqrt(2 * numel)))

    warning = r"'1\.each\.0\.weight' and 1 more mean different"
    with pytest.warns(UserWarning, match=warning) as warned:
        run_threads(body, RANKS)
    assert next(w.filename for w in warned if "mean different" in str(w.message)) == __file__


def test_what_some_ranks_call_by_one_name_is_refused_on_all() -> None:
    alone = [Communicator.local_group(1)[0] for _ in range(4)]

    def body(comm: Communicator) -> None:
        experts = nn.Sequential()
        if comm.rank < 2:
            experts.add_module(f"of rank {comm.rank}", nn.Linear(WIDTH, WIDTH))
        else:
            experts.register_parameter("unused", nn.Parameter(torch.zeros(1)))
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), experts)
        engine = fully_shard(model, comm, units={experts: Policy(comm=alone[comm.rank])})
        optimizer = torch.optim.AdamW(model.parameters())
        for save in (
            engine.state_dict,
            engine.full_state_dict,
            partial(engine.optimizer_state, optimizer),
            shardcomm.ExponentialMovingAverage(engine).state_dict,
        ):
            with pytest.raises(
                RuntimeError, match=r"'1\.unused' means different parameters on dif"
            ):
                save()

    with pytest.warns(UserWarning, match=r"'1\.unused' means different parameters"):
        run_threads(body, 4, deadline_s=20)


@pytest.mark.covers("expert meshes", "gradient clipping")
@pytest.mark.slow
def test_a_rank_without_a_gradient_is_clipped_with_the_engine_and_missed_without() -> None:
    """Torch takes no norm of no gradient: the other rank ends at its deadline, with a sentence."""
    same = [Communicator.local_group(1)[0] for _ in range(2)]

    def body(comm: Communicator) -> None:
        shared, expert = nn.Linear(4, 4), nn.Linear(4, 4)
        model = nn.Sequential(shared, expert)
        engine = fully_shard(
            model, comm, units={shared: None, expert: Policy(comm=same[comm.rank])}
        )
        model.forward = lambda x: expert(shared(x)) if comm.rank == 0 else shared(x)
        model(torch.ones(1, 4)).sum().backward()
        grads = [p.grad for p in expert.parameters() if p.grad is not None]
        assert len(grads) == (2 if comm.rank == 0 else 0)
        norm = engine.clip_grad_norm_(1e9)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1e9) + 0, norm)
        if comm.rank == 1:
            assert clip_grad_norm_(expert.parameters(), 1.0) == 0.0
        else:
            with pytest.raises(CommError, match="rank 1 did not come within 5 s"):
                clip_grad_norm_(expert.parameters(), 1.0)

    run_threads(body, RANKS, deadline_s=5)


def test_an_expert_that_is_not_sharded_may_have_no_gradient_on_some_of_its_ranks() -> None:
    """As no token came to it there; on none of its ranks in the second backward, and on all in the third."""
    same = [Communicator.local_group(2, deadline_s=10) for _ in range(2)]

    def called(rank: int, backward: int) -> bool:
        return [rank != 1, False, True][backward]

    class Routed(nn.Sequential):
        def forward(self, x: torch.Tensor, to_expert: bool) -> torch.Tensor:  # type: ignore[override]
            x = self[0](x)
            return self[1](x) if to_expert else x

    def loss_of(model: nn.Module, rank: int, backward: int) -> torch.Tensor:
        out: torch.Tensor = model(tokens_of(rank, backward), called(rank, backward))
        return out.square().sum()

    def net(rank: int) -> Routed:
        with seeded():
            shared, experts = nn.Linear(WIDTH, WIDTH), [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        return Routed(shared, experts[rank % 2])

    plain = [net(rank) for rank in range(4)]
    for backward in range(3):
        for rank, each in enumerate(plain):
            (loss_of(each, rank, backward) / 4).backward()

    def grad_of(rank: int, name: str) -> torch.Tensor:
        ranks = range(4) if name.startswith("0") else (rank % 2, rank % 2 + 2)
        return sum(plain[r].get_parameter(name).grad for r in ranks)  # type: ignore[misc, return-value]

    def body(comm: Communicator) -> None:
        model = net(comm.rank)
        policy = Policy(comm=same[comm.rank % 2][comm.rank // 2])
        fully_shard(model, comm, units={model[1]: policy}, strategy="no_shard")
        for backward in range(3):
            loss_of(model, comm.rank, backward).backward()
        for name, param in model.named_parameters():
            grad = param.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(grad, grad_of(comm.rank, name), msg=name)

    run_threads(body, 4, deadline_s=10)


@pytest.mark.covers("expert meshes", "loss scaling, NaN and Inf")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("scaler_of", [torch.amp.GradScaler, shardcomm.GradScaler])
def test_a_scaler_steps_where_some_ranks_experts_have_no_gradient(
    scaler_of: Any, strategy: str
) -> None:
    same = [Communicator.local_group(2, deadline_s=20) for _ in range(2)]

    def body(comm: Communicator) -> float:
        mine, rank = divmod(comm.rank, 2)
        shared, expert = nn.Linear(4, 4), nn.Linear(4, 4)
        model = nn.ModuleDict({"shared": shared, f"expert{mine}": expert})
        model.forward = lambda x: expert(shared(x)) if mine else shared(x)
        engine = fully_shard(
            model,
            comm,
            units={shared: None, expert: Policy(comm=same[mine][rank])},
            strategy=strategy,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        on = "cpu" if scaler_of is torch.amp.GradScaler else engine
        scaler = scaler_of(on, init_scale=4.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return float(scaler.get_scale())

    assert run_threads(body, 4) == [4.0] * 4


@pytest.mark.parametrize("spare", [False, True])
def test_a_rank_without_experts_is_told_to_have_a_unit_of_its_own(spare: bool) -> None:
    same = [*Communicator.local_group(2), *Communicator.local_group(1)]

    def body(comm: Communicator) -> None:
        shared, own = nn.Linear(4, 4), nn.Linear(4, 4)
        has_experts = comm.rank < 2
        model = nn.ModuleDict({"shared": shared})
        if has_experts or spare:
            model["expert" if has_experts else "spare"] = own
        model.forward = lambda x: own(shared(x)) if has_experts else shared(x)
        units = {shared: None, own: Policy(comm=same[comm.rank])}
        if not has_experts and not spare:
            del units[own]
        if not spare:
            with pytest.raises(
                CommError, match=r"give a unit with .*\): 2 on ranks 0, 1 and 1 on rank 2"
            ):
                fully_shard(model, comm, units=units)
            comm.barrier()  # all were told, and go on
            return
        fully_shard(model, comm, units=units)
        for param in (*shared.parameters(), *own.parameters()):
            nn.init.ones_(param)
        model(torch.ones(1, 4)).sum().backward()
        norm = clip_grad_norm_(model.parameters(), 1e9)
        shared_out = torch.full((4,), 5.0)
        # d/d expert: its input, by two ranks of three; d/d shared: 4 on two ranks and 1 on the third, their mean.
        expert = 2 / 3 * torch.cat([shared_out.repeat(4), torch.ones(4)])
        mean = (4.0 + 4.0 + 1.0) / 3 * torch.ones(20)
        torch.testing.assert_close(norm + 0, torch.cat([expert, mean]).norm())

    run_threads(body, 3)


def save_experts(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with (
        Communicator.from_process_group() as comm,
        Communicator.from_process_group(groups[rank % 2]) as experts,
    ):
        model = mixtures(range(2 * (rank % 2), 2 * (rank % 2) + 2))
        engine = fully_shard(model, comm, units={Mixture: None, Experts: Policy(comm=experts)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        for number, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 1.0 + number + rank % 2)
        optimizer.step()
        state = {"model": engine, "optimizer": engine.optimizer_state(optimizer)}
        dcp.save(state, checkpoint_id=folder)
        moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
        values = [local(p).clone() for p in model.parameters()]
        for param in model.parameters():
            optimizer.state[param]["exp_avg"].zero_()
            param.detach().zero_()
        optimizer.param_groups[0]["lr"] = 0.1
        dcp.load(state, checkpoint_id=folder)
        assert optimizer.param_groups[0]["lr"] == 0.5
        for param, moment, value in zip(model.parameters(), moments, values, strict=True):
            assert torch.equal(local(optimizer.state[param]["exp_avg"]), local(moment))
            assert torch.equal(local(param), value)
    dist.destroy_process_group()


@pytest.mark.covers("expert meshes", "checkpoints", transports=["shm"])
def test_a_checkpoint_has_the_experts_of_all_ranks(tmp_path: Path) -> None:
    launch(save_experts, 4, (str(tmp_path),), timeout_s=60)
    whole = nn.Sequential(*(Mixture(WIDTH, range(EXPERTS)) for _ in range(2)))
    optimizer = torch.optim.AdamW(whole.parameters())
    model, moments = get_state_dict(whole, optimizer)
    state = {"model": model, "optimizer": moments}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(whole, optimizer, model_state_dict=model, optim_state_dict=moments)
    names = {name for name, _ in whole.named_parameters()}
    assert set(moments["param_groups"][0]["params"]) == names
    # A step of AdamW from the start goes by lr, against the gradient's sign, and decays by lr / 100.
    for name, value in mixtures(range(EXPERTS)).state_dict().items():
        torch.testing.assert_close(model[name], value * (1 - 0.005) - 0.5, msg=name)
    experts = [whole.get_parameter(f"0.experts.each.{n}.weight") for n in range(EXPERTS)]
    firsts = [float(optimizer.state[each]["exp_avg"][0, 0]) for each in experts]
    torch.testing.assert_close(firsts, [0.1 * grad for grad in (3.0, 5.0, 4.0, 6.0)])


def test_groups_of_parameters_that_differ_between_ranks_are_refused_on_all() -> None:
    def body(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(1 + comm.rank)]
        for number, expert in enumerate(experts):
            model.add_module(f"expert{comm.rank}_{number}", expert)
        alone = Policy(comm=Communicator.local_group(1)[0])
        engine = fully_shard(model, comm, units=dict.fromkeys(experts, alone))
        modules = [model[0], *experts]
        groups = [{"params": list(module.parameters())} for module in modules]
        state = engine.optimizer_state(torch.optim.SGD(groups, lr=0.1))
        with pytest.raises(ValueError, match=r"ranks have \[2, 3\] groups of parameters"):
            state.state_dict()

    run_threads(body, 2)
