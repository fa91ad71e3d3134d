"""AdamW over runs of neighbours against torch.optim.AdamW(fused=True), parameter by parameter."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardcomm import AdamW, Communicator, GradScaler, fully_shard
from support import interpreters
from support.thread_ranks import run_threads

Change = Callable[[torch.optim.Optimizer, Sequence[nn.Parameter]], None]

LANES = (
    32  # elements that fill whole vector registers, so that nothing depends on where a run begins
)


def flat_parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Back to back in one tensor, their gradients likewise."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    memory = [part.split(numels) for part in torch.randn(2, sum(numels)).to(dtype)]
    params = []
    for shape, values, grad in zip(shapes, *memory, strict=True):
        params.append(nn.Parameter(values.view(shape)))
        params[-1].grad = grad.view(shape)
    return params


def apart(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The same parameters and gradients, each in memory of its own."""
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    copy_gradients(params, copies)
    return copies


def copy_gradients(source: Sequence[nn.Parameter], target: Sequence[nn.Parameter]) -> None:
    for mine, theirs in zip(source, target, strict=True):
        theirs.grad = None if mine.grad is None else mine.grad.clone()


def fused(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, fused=True, **options)


def assert_equal(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Parameters and state, bit for bit."""
    pairs = zip(mine.param_groups, theirs.param_groups, strict=True)
    for a, b in ((a, b) for x, y in pairs for a, b in zip(x["params"], y["params"], strict=True)):
        assert torch.equal(a, b)
        assert list(mine.state[a]) == list(theirs.state[b])
        for name, value in theirs.state[b].items():
            got = mine.state[a][name]
            assert (got.shape, got.dtype) == (value.shape, value.dtype)
            assert torch.equal(got, value), name


class _Updates(TorchDispatchMode):
    """Tensors in each call of the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket is torch.ops.aten._fused_adamw_:
            self.counts.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True, "weight_decay": 0}])
def test_groups_and_missing_gradients_are_as_torch_has_them(
    dtype: torch.dtype, options: dict[str, Any], seed: int
) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    params = flat_parameters([(chance.randint(0, 5), LANES) for _ in range(24)], dtype)
    params[3].requires_grad_(False)
    params[3].grad = None
    plain = apart(params)

    def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": of[:9]},
            {"params": of[9::2], "lr": 0.1, "betas": (0.8, 0.9)},
            {"params": of[10::2], "weight_decay": 0.3},
        ]

    ours, theirs = AdamW(groups(params), **options), fused(groups(plain), **options)
    grads = [param.grad for param in params]
    for step in range(8):
        for param, grad in zip(params, grads, strict=True):
            skipped = step % 2 == 1 and chance.random() < 0.2
            param.grad = None if grad is None or skipped else grad.normal_()
        copy_gradients(params, plain)
        ours.step()
        theirs.step()
        assert_equal(ours, theirs)


def test_odd_sizes_differ_in_the_last_bits_only(seed: int) -> None:
    """PyTorch's kernel rounds what does not fill a vector register otherwise, and runs fill other ones."""
    torch.manual_seed(seed)
    params = flat_parameters([(n % 7 + 1, 5) for n in range(40)], torch.float32)
    plain = apart(params)
    AdamW(params).step()
    fused(plain).step()
    for mine, theirs in zip(params, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def test_neighbours_are_updated_in_one_go() -> None:
    params = flat_parameters([(LANES,)] * 10, torch.float32)
    optimizer = AdamW(params)
    with _Updates() as updates:
        optimizer.step()
        params[4].grad = None
        optimizer.step()
    assert updates.counts == [1, 2]
    storages = {optimizer.state[p]["exp_avg"].untyped_storage().data_ptr() for p in params}
    assert len(storages) == 1


def test_what_lies_between_but_is_not_passed_stays_as_it_is() -> None:
    first, between, last = flat_parameters([(3,), (4,), (5,)], torch.float32)
    before = between.detach().clone()
    AdamW([last, first]).step()
    assert torch.equal(between, before)


def test_gradients_and_state_of_other_strides_than_their_parameters() -> None:
    """Which torch's fused kernel, at least until 2.13, takes for the parameter's strides on a CPU."""
    params = flat_parameters([(4, 8), (8, 4)], torch.float32)
    plain = apart(params)
    for both in (params, plain):
        assert both[1].grad is not None
        both[1].grad = both[1].grad.view(4, 8).t()  # the same memory
    ours = AdamW(params)
    theirs = torch.optim.AdamW(plain, fused=False, foreach=False)
    for _ in range(2):
        ours.step()
        theirs.step()
        state = ours.state_dict()
        moments = state["state"][1]
        moments["exp_avg"] = moments["exp_avg"].t().contiguous().t()
        ours.load_state_dict(state)
    for mine, wanted in zip(params, plain, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_parameters_with_gaps_are_refused() -> None:
    param = nn.Parameter(torch.zeros(4, 4)[:, ::2])
    param.grad = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"shape \(4, 2\) has strides \(4, 2\), with gaps"):
        AdamW([param]).step()


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"shape \(4, 2\) has a torch.sparse_coo gradient.*Sparse"):
        AdamW(table.parameters()).step()


def test_torchs_choices_of_how_it_is_computed_are_taken_or_named() -> None:
    params = [nn.Parameter(torch.zeros(4))]
    AdamW(params, fused=True, foreach=False, capturable=False, differentiable=None)
    with pytest.raises(ValueError, match=r"AdamW: foreach is True; .* it must be False.*left out"):
        AdamW(params, foreach=True)
    with pytest.raises(ValueError, match=r"AdamW: fused is False; .* it must be True.*left out"):
        AdamW(params, fused=False)
    with pytest.raises(TypeError, match="there is no argument momentum="):
        AdamW(params, momentum=None)


def test_permuted_parameters_are_neighbours_too() -> None:
    """As the layout stores those that are cut along another dim than the first."""
    memory, grads = torch.randn(2, 2 * LANES, 2)
    params = [nn.Parameter(part.t()) for part in memory.split(LANES)]
    for param, grad in zip(params, grads.split(LANES), strict=True):
        param.grad = grad.t()
    plain = [nn.Parameter(param.detach().clone()) for param in params]
    copy_gradients(params, plain)
    ours, theirs = AdamW(params), fused(plain)
    with _Updates() as updates:
        ours.step()
    theirs.step()
    assert updates.counts == [1]
    assert_equal(ours, theirs)


def resumed(saving: torch.optim.Optimizer, make: Any) -> torch.optim.Optimizer:
    """An optimizer that goes on where `saving` is, with parameters of its own, back to back."""
    params = saving.param_groups[0]["params"]
    copies = flat_parameters([param.shape for param in params], torch.float32)
    with torch.no_grad():
        for copied, param in zip(copies, params, strict=True):
            copied.copy_(param)
            copied.grad.copy_(param.grad)
    optimizer: torch.optim.Optimizer = make(copies)
    optimizer.load_state_dict(copy.deepcopy(saving.state_dict()))
    return optimizer


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [(AdamW, fused), (fused, AdamW), (AdamW, AdamW)]
)
def test_state_dicts_are_interchangeable(saved_by: Any, loaded_by: Any) -> None:
    saving = saved_by(flat_parameters([(LANES,)] * 6, torch.float32), lr=0.1)
    for _ in range(2):
        saving.step()
    loading = resumed(saving, loaded_by)
    assert loading.state_dict().keys() == saving.state_dict().keys()
    assert loading.param_groups[0]["lr"] == 0.1
    for _ in range(2):
        saving.step()
        loading.step()
        assert_equal(loading, saving)


def test_state_of_torchs_unfused_loop_is_taken_over() -> None:
    saving = torch.optim.AdamW(flat_parameters([(LANES,)] * 6, torch.float32), lr=0.1)
    saving.step()
    ours, theirs = resumed(saving, AdamW), resumed(saving, fused)
    theirs.param_groups[0]["fused"] = True  # which loading has set to the saved None
    ours.step()
    theirs.step()
    assert_equal(ours, theirs)


def test_training_does_not_load_the_compiler() -> None:
    """Which torch's optimizers load: each rank for seconds."""
    ranks = interpreters.run_ranks(
        """
import sys, torch, shardcomm
model = torch.nn.Linear(2, 2)
shardcomm.fully_shard(model, shardcomm.Communicator.from_env())
optimizer = shardcomm.AdamW(model.parameters())
model(torch.ones(2)).sum().backward()
optimizer.step()
optimizer.zero_grad()
model.weight.detach().mul_(2).add(1)
assert "torch._dynamo" not in sys.modules
""",
        ranks=2,
    )
    assert [done.returncode for done in ranks] == [0, 0], ranks


def test_schedulers_and_grad_scaler_work_as_with_torch() -> None:
    params = flat_parameters([(LANES,)] * 4, torch.float32)
    plain = apart(params)
    for optimizer in (ours := AdamW(params, lr=0.1), theirs := fused(plain, lr=0.1)):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        mine = optimizer.param_groups[0]["params"]
        for step in range(3):
            if step == 1:
                kept = mine[2].grad.clone()
                mine[2].grad.fill_(float("inf"))
            before = mine[0].detach().clone()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            assert torch.equal(before, mine[0]) is (step == 1)
            if step == 1:
                mine[2].grad.copy_(kept)
    assert_equal(ours, theirs)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(LANES, LANES) for _ in range(3)]
    return nn.Sequential(nn.LayerNorm(LANES), *layers)


@pytest.mark.covers("optimizers")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sharded_model_trains_as_with_torchs(ranks: int) -> None:
    nets = [net() for _ in range(2 * ranks)]

    def body(comm: Communicator) -> None:
        states = []
        for model, make in zip(nets[2 * comm.rank :], (AdamW, fused), strict=False):
            engine = fully_shard(model, comm, units=nn.Linear)
            optimizer = make(model.parameters(), lr=0.05)
            for step in range(3):
                x = torch.full((2, LANES), 0.1 * (1 + step + comm.rank))
                model(x + torch.arange(LANES)).square().sum().backward()
                updates = _Updates()
                with updates:
                    optimizer.step()
                if make is AdamW:
                    assert updates.counts == [4]  # one for each bucket
                optimizer.zero_grad()
            states.append(engine.full_state_dict())
        for name, value in states[1].items():
            assert torch.equal(states[0][name], value), name

    run_threads(body, ranks)


@pytest.mark.covers("optimizers", "loss scaling, NaN and Inf")
def test_infinity_on_one_rank_skips_the_step_on_all() -> None:
    nets = [net() for _ in range(2)]

    def body(comm: Communicator) -> None:
        model = nets[comm.rank]
        engine = fully_shard(model, comm, units=nn.Linear)
        optimizer = AdamW(model.parameters(), lr=0.05)
        scaler = GradScaler(engine, init_scale=4.0)
        before = engine.full_state_dict()
        for step in range(2):
            scaler.scale(model(torch.ones(2, LANES)).square().sum()).backward()
            if step == 0 and comm.rank == 1:
                grad = model[1].weight.grad
                assert grad is not None
                grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = engine.full_state_dict()
            assert all(torch.equal(after[name], before[name]) for name in before) is (step == 0)

    run_threads(body, 2)


def gradients_in(arrangement: str, params: Sequence[nn.Parameter]) -> None:
    """New ones: neighbours in one storage, or not, in several ways."""
    numels = [param.numel() for param in params]
    starts = [sum(numels[:i]) for i in range(len(numels))]
    if arrangement == "reversed":
        starts = [sum(numels[i + 1 :]) for i in range(len(numels))]
    memory = torch.randn(sum(numels))
    for param, start, numel in zip(params, starts, numels, strict=True):
        if arrangement == "in storages of their own":  # at the same offsets
            memory = torch.randn(sum(numels))
        flat = memory[start : start + numel]
        if arrangement == "turned" and param.dim() == 2:
            param.grad = flat.view(param.shape[::-1]).t()
        else:
            param.grad = flat.view(param.shape)
        if arrangement == "apart":
            param.grad = param.grad.clone()


def test_gradients_that_move_are_found_again(seed: int) -> None:
    torch.manual_seed(seed)
    params = flat_parameters([(LANES,), (2 * LANES,), (LANES, 3)], torch.float32)
    twins = apart(params)
    mine, theirs = AdamW(params), fused(twins)
    ways = ["neighbours", "reversed", "in storages of their own", "turned", "apart"]
    for before, after in permutations(ways, 2):
        for arrangement in (before, after):
            gradients_in(arrangement, params)
            for param, twin in zip(params, twins, strict=True):
                assert param.grad is not None
                twin.grad = param.grad.clone(memory_format=torch.contiguous_format)
            mine.step()
            theirs.step()
            assert_equal(mine, theirs)


def test_state_that_is_loaded_between_steps_counts_from_the_next_one() -> None:
    params = flat_parameters([(LANES,), (2 * LANES,)], torch.float32)
    twins = apart(params)
    mine, theirs = AdamW(params), fused(twins)
    mine.step()
    theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    for _ in range(2):
        mine.step()
        theirs.step()
    for optimizer in (mine, theirs):
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.step()
    assert_equal(mine, theirs)


def drop_all(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    optimizer.state.clear()


def drop_one(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    del optimizer.state[params[1]]


def replace_a_moment(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    optimizer.state[params[1]]["exp_avg"] = torch.zeros_like(params[1])


def replace_a_step(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    optimizer.state[params[1]]["step"] = torch.tensor(100.0)


def zero_one(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    for tensor in optimizer.state[params[1]].values():
        tensor.zero_()


def write_the_step_of_the_first(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]
) -> None:
    optimizer.state[params[0]]["step"].fill_(100)


def switch_amsgrad_off(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
    optimizer.param_groups[0]["amsgrad"] = False


@pytest.mark.parametrize(
    "change",
    [
        drop_all,
        drop_one,
        replace_a_moment,
        replace_a_step,
        zero_one,
        write_the_step_of_the_first,
        switch_amsgrad_off,
    ],
)
def test_what_is_changed_between_steps_counts_from_the_next_one(change: Change) -> None:
    mine = flat_parameters([(LANES,), (2, LANES), (LANES,)], torch.float32)
    theirs = apart(mine)
    amsgrad = change is switch_amsgrad_off
    optimizers = [AdamW(mine, amsgrad=amsgrad), fused(theirs, amsgrad=amsgrad)]
    for step in range(4):
        for i, param in enumerate(mine):
            assert param.grad is not None
            param.grad.fill_(1.0 + i + step)  # where it was: all of them are one run
        copy_gradients(mine, theirs)
        for optimizer, params in zip(optimizers, (mine, theirs), strict=True):
            optimizer.step()
            if step == 1:
                change(optimizer, params)
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(mine, theirs, strict=True):
        for name, value in optimizers[1].state[b].items():
            assert torch.equal(optimizers[0].state[a][name], value), name


def test_amsgrad_that_is_switched_on_has_seen_nothing_before() -> None:
    params = flat_parameters([(4, 8), (8,)], torch.float32)
    optimizer = AdamW(params)
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.step()
    for param in params:
        state = optimizer.state[param]
        assert torch.equal(
            state["max_exp_avg_sq"], state["exp_avg_sq"]
        )  # the gradients are the same


def test_steps_in_inference_mode_are_torchs() -> None:
    mine = flat_parameters([(LANES,), (2 * LANES,)], torch.float32)
    theirs = apart(mine)
    optimizers = [AdamW(mine), fused(theirs)]
    with torch.inference_mode():
        for optimizer in optimizers:
            for _ in range(3):
                optimizer.step()
    assert_equal(*optimizers)
