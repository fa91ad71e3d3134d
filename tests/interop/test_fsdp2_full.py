"""Level "full" of `fsdp2.attach`: what it checks, when it gives way, and whatever state a model is in."""

from __future__ import annotations

import gc
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.testing._internal.distributed import multi_threaded_pg

from shardcomm import CommError, fsdp2, launch
from shardcomm.interop.fsdp2 import full as full_module
from shardcomm.interop.fsdp2 import internals
from support.fsdp2_cases import Case, Net, fsdp_modules, make, optimizer_of, step

X = torch.ones(2, 5)


class Twins:
    """A model and its equal, on which a test does the same with and without an attachment."""

    def __init__(self, mesh: DeviceMesh, case: Case) -> None:
        self.ours, self.theirs = make(case, mesh), make(case, mesh)
        self._optimizers = [optimizer_of(net) for net in (self.ours, self.theirs)]
        self._case = case

    def step(self, seed: int) -> None:
        nets = zip((self.ours, self.theirs), self._optimizers, strict=True)
        ours, theirs = (step(*each, seed, self._case) for each in nets)
        assert ours == theirs, (seed, ours, theirs)

    def each(self, function: Callable[[Net], object]) -> None:
        for net in (self.ours, self.theirs):
            function(net)

    def check(self) -> None:
        for ours, theirs in zip(self.ours.parameters(), self.theirs.parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), theirs.full_tensor())


def taken(attached: fsdp2.Attached) -> set[tuple[str, str]]:
    return {receipt[2:] for receipt in attached.receipts}


@pytest.mark.covers("FSDP2 attached")
def test_a_model_may_be_in_any_state() -> None:
    launch(go_through_states, 2, timeout_s=60)


def go_through_states() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for scenario in SCENARIOS:
        twins = Twins(mesh, Case())
        scenario(twins)
        twins.step(100)
        twins.check()
    dist.destroy_process_group()


def first_gathered_in_inference_mode(twins: Twins) -> None:
    with attached_to(twins):
        with torch.inference_mode():
            twins.ours(X)
        twins.ours.reshard()
        twins.step(0)


def evaluated_between_steps(twins: Twins) -> None:
    def evaluate(net: Net) -> None:
        with torch.no_grad():
            net(X)

    twins.each(evaluate)  # the root stays unsharded, in torch's memory
    with attached_to(twins) as attached:
        for seed in range(3):
            twins.step(seed)
            twins.each(evaluate)
        assert taken(attached) == {("full", "")}
    twins.step(3)


def unsharded_by_hand(twins: Twins) -> None:
    with attached_to(twins):
        twins.step(0)
        handles = [module.unshard(async_op=True) for module in fsdp_modules(twins.ours)]
        for handle in handles:
            assert handle is not None
            handle.wait()
        weights = [p.detach().clone() for p in twins.ours.blocks.parameters()]
        expected = [p.full_tensor() for p in twins.theirs.blocks.parameters()]
        assert all(map(torch.equal, weights, expected))
        twins.step(1)


def detached_while_unsharded(twins: Twins) -> None:
    with attached_to(twins):
        twins.step(0)
        for module in fsdp_modules(twins.ours):
            module.unshard(async_op=True)
    twins.step(1)


def attached_and_detached_between_micro_batches(twins: Twins) -> None:
    def accumulate(net: Net) -> None:
        net.set_requires_gradient_sync(False)  # type: ignore[operator]
        net(X).square().sum().backward()

    twins.step(0)
    twins.each(accumulate)
    with attached_to(twins):
        for _ in range(3):
            twins.each(accumulate)
    twins.each(accumulate)
    twins.step(1)


def attached_and_detached_between_forward_and_backward(twins: Twins) -> None:
    def forward(net: Net) -> torch.Tensor:
        return net(X).square().sum()  # type: ignore[no-any-return]

    losses = [forward(net) for net in (twins.ours, twins.theirs)]
    with attached_to(twins):
        losses += [forward(net) for net in (twins.ours, twins.theirs)]
        for loss in losses:
            loss.backward()
        twins.step(0)
        losses = [forward(net) for net in (twins.ours, twins.theirs)]
    losses += [forward(net) for net in (twins.ours, twins.theirs)]
    for loss in losses:
        loss.backward()
    twins.step(1)


def unsharded_before_it_is_attached(twins: Twins) -> None:
    first, second, _ = fsdp_modules(twins.ours.blocks)
    first.unshard()
    second.unshard(async_op=True)
    with attached_to(twins):  # so its first gather is in backward
        twins.step(0)
        twins.step(1)


def detached_after_an_error_in_forward(twins: Twins) -> None:
    def fail(net: Net) -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(X[:, 1:])  # in the root's own layer: its forward never ends

    with attached_to(twins):
        twins.step(0)
        twins.each(fail)
    twins.step(1)


def frozen_later(twins: Twins) -> None:
    with attached_to(twins):
        twins.step(0)
        twins.each(lambda net: net.blocks[1].requires_grad_(False))
        twins.step(1)
        twins.each(lambda net: net.blocks[1].requires_grad_(True))
        twins.step(2)


def loaded_between_steps(twins: Twins) -> None:
    with attached_to(twins):
        twins.step(0)
        saved = {name: value.clone() for name, value in twins.theirs.state_dict().items()}
        twins.step(1)
        twins.each(lambda net: net.load_state_dict(saved))
        twins.step(2)


def given_another_gather(twins: Twins) -> None:
    with attached_to(twins) as attached:
        twins.step(0)
        twins.step(1)
        twins.ours.blocks[1].set_custom_all_gather(DefaultAllGather())
        twins.step(2)
        twins.ours.blocks[1].set_custom_reduce_scatter(DefaultReduceScatter())
        with pytest.raises(ValueError, match="'' is attached already; call detach"):
            fsdp2.attach(twins.ours.blocks[1])
        assert taken(attached) == {
            ("full", ""),
            (
                "copies",
                "not full: its all-gather has been replaced; its reduce-scatter has been replaced",
            ),
        }


SCENARIOS = (
    first_gathered_in_inference_mode,
    evaluated_between_steps,
    unsharded_by_hand,
    detached_while_unsharded,
    attached_and_detached_between_micro_batches,
    attached_and_detached_between_forward_and_backward,
    unsharded_before_it_is_attached,
    detached_after_an_error_in_forward,
    frozen_later,
    loaded_between_steps,
    given_another_gather,
)


@contextmanager
def attached_to(twins: Twins) -> Iterator[fsdp2.Attached]:
    attached = fsdp2.attach(twins.ours, level="full")
    yield attached
    attached.detach()


def test_where_the_first_gather_differs_on_one_rank_torchs_stays_on_all() -> None:
    launch(differ_on_one_rank, 2, timeout_s=60)


def differ_on_one_rank() -> None:
    dist.init_process_group("gloo")
    twins = Twins(init_device_mesh("cpu", (2,)), Case())
    pack = full_module.FullGather._pack

    def wrong(gather: full_module.FullGather) -> None:
        pack(gather)
        assert gather._window is not None
        if dist.get_rank() == 1 and gather._name == "blocks.1":
            gather._window.params[0][0] = -1.0

    with pytest.MonkeyPatch.context() as patch, attached_to(twins) as attached:
        patch.setattr(full_module.FullGather, "_pack", wrong)
        twins.step(0)
        patch.undo()
        twins.step(1)
        reason = (
            f"not full: with torch {torch.__version__} our first gather was not the same as torch's"
        )
        assert [receipt[2:] for receipt in attached.receipts].count(("copies", reason)) == 1
        assert taken(attached) == {("full", ""), ("copies", reason)}
    twins.check()
    dist.destroy_process_group()


def test_another_torch_stays_at_copies() -> None:
    launch(attach_in_another_torch, 2, timeout_s=60)


def attach_in_another_torch() -> None:
    dist.init_process_group("gloo")
    twins = Twins(init_device_mesh("cpu", (2,)), Case())
    with pytest.MonkeyPatch.context() as patch:
        # The package's attribute of that name is the function.
        module = importlib.import_module("shardcomm.interop.fsdp2.attach")
        patch.setattr(module, "difference", lambda: "torch 3.0's FSDP2 has no reshard")
        with attached_to(twins) as attached:
            twins.step(0)
            assert taken(attached) == {("copies", "not full: torch 3.0's FSDP2 has no reshard")}
    twins.check()
    dist.destroy_process_group()


def test_receipts_name_full_from_the_second_gather_on() -> None:
    launch(read_receipts, 2, timeout_s=60)


def read_receipts() -> None:
    dist.init_process_group("gloo")
    net = make(Case(), init_device_mesh("cpu", (2,)))
    attached = fsdp2.attach(net)
    before = {("copies", "not full: its first gather is torch's, and ours is held against it")}
    assert taken(attached) == before
    with torch.no_grad():
        net(X)
    assert taken(attached) == {("full", "")}
    dist.destroy_process_group()


def test_a_model_dropped_while_attached_leaves_nothing() -> None:
    launch(drop_attached, 2, timeout_s=60)


def drop_attached() -> None:
    dist.init_process_group("gloo")
    before = dict(vars(internals.torchs_gather))
    net = make(Case(), init_device_mesh("cpu", (2,)))
    attached = fsdp2.attach(net)
    step(net, optimizer_of(net), 0)
    assert dict(vars(internals.torchs_gather)) != before
    del net, attached
    gc.collect()
    assert dict(vars(internals.torchs_gather)) == before
    assert "memfd:shardcomm" not in Path("/proc/self/maps").read_text()
    dist.destroy_process_group()


@pytest.mark.covers("FSDP2 attached")
def test_ranks_may_be_threads() -> None:
    # In a process of its own: it replaces what torch.distributed keeps.
    launch(be_threads, 1, timeout_s=60)


def be_threads() -> None:
    multi_threaded_pg._install_threaded_pg()  # type: ignore[no-untyped-call]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def rank_main(rank: int) -> list[str]:
        dist.init_process_group("threaded", rank=rank, world_size=3, store=store)
        mesh = init_device_mesh("cpu", (3,))
        with building:  # torch's generator belongs to all threads
            net = make(Case(), mesh)
        attached = fsdp2.attach(net)
        optimizer = optimizer_of(net)
        for seed in range(2):
            step(net, optimizer, seed)
        assert taken(attached) == {("full", "")}
        return [comm.transport for comm in attached.communicators]

    building = threading.Lock()
    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(rank_main, range(3))) == [["local"]] * 3


def test_ranks_that_gather_different_blocks_are_told() -> None:
    launch(run_different_blocks, 2, timeout_s=60)


def run_different_blocks() -> None:
    dist.init_process_group("gloo")
    net = make(Case(), init_device_mesh("cpu", (2,)))
    fsdp2.attach(net)
    with torch.no_grad():
        net(X)
    with pytest.raises(
        CommError,
        match=r"called barrier\(\) of module 'blocks.[01]'.*called barrier\(\) of module 'blocks.[01]'",
    ):
        net.blocks[dist.get_rank()](torch.ones(2, 12))
    dist.destroy_process_group()


def gather_while_a_rank_reads() -> None:
    """Rank 0 has new values, and gathers them; rank 1 still reads the old ones, and calls later."""
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    net = make(Case(), init_device_mesh("cpu", (2,)))
    attached = fsdp2.attach(net)
    for seed in range(2):  # "full" is in force from the second gather on
        step(net, optimizer_of(net), seed, Case())
    assert taken(attached) == {("full", "")}
    module = fsdp_modules(net.blocks)[0]
    module.unshard()
    held = next(module.parameters()).detach()
    before = held.clone()
    module.reshard()
    dist.barrier()
    if dist.get_rank() == 0:
        with torch.no_grad():
            for param in module.parameters():
                param.to_local().add_(1.0)  # type: ignore[operator]
        pack = full_module.CopyPlan.run

        def packs(*args: object, **options: object) -> None:
            pack(*args, **options)  # type: ignore[arg-type]
            store.set("written", "")

        full_module.CopyPlan.run = packs  # type: ignore[method-assign, assignment]
        module.unshard()
    else:
        # It is written only when this rank comes to the gather; until then one may look as long as one likes.
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert not store.check(["written"])
        assert torch.equal(held, before)
        module.unshard()
    assert not torch.equal(next(module.parameters()), before)
    module.reshard()
    attached.detach()
    dist.destroy_process_group()


def test_a_rank_that_still_reads_is_waited_for() -> None:
    launch(gather_while_a_rank_reads, 2, timeout_s=60)


def differ_in_the_eyes_of_one_rank() -> None:
    dist.init_process_group("gloo")
    twins = Twins(init_device_mesh("cpu", (2,)), Case())
    with pytest.MonkeyPatch.context() as patch, attached_to(twins) as attached:
        patch.setattr(full_module, "_same_bits", lambda *_: dist.get_rank() == 0)
        twins.step(0)
        patch.undo()
        assert {receipt.taken for receipt in attached.receipts} == {"copies"}
        twins.step(1)
    twins.check()
    dist.destroy_process_group()


def test_what_differs_on_one_rank_alone_is_given_up_on_all() -> None:
    launch(differ_in_the_eyes_of_one_rank, 2, timeout_s=60)
