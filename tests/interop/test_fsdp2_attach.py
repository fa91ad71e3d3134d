"""A model sharded by torch's FSDP2 trains the same with our collectives attached as with torch's own, on Gloo."""

from __future__ import annotations

import gc
import os
import runpy
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import Shard

from shardcomm import CommError, fsdp2, launch
from shardcomm import fully_shard as shardcomm_fully_shard
from shardcomm.comm import introduction
from shardcomm.interop.fsdp2 import Attached, Level, internals
from support.fsdp2_cases import (
    CASES,
    CASES_OF_4,
    WIDTH,
    Case,
    Even,
    Net,
    fsdp_modules,
    make,
    optimizer_of,
    step,
    train,
)

LEVELS: tuple[Level, ...] = get_args(Level)
REPLICAS = "the all-reduce between replicas stays torch's: FSDP2 has no hook for it"


def check_same(name: str, ours: Any, theirs: Any, tolerance: float) -> None:
    (losses, params), (their_losses, their_params) = ours, theirs
    compare = partial(
        torch.testing.assert_close,
        rtol=tolerance,
        atol=tolerance,
        msg=lambda said: f"{name}: {said}",
    )
    compare(losses, their_losses)
    assert params.keys() == their_params.keys()
    for key, value in params.items():
        compare(value, their_params[key], msg=lambda said, key=key: f"{name}, {key}: {said}")


def check_receipts(name: str, case: Case, level: Level, attached: Attached) -> None:
    left = REPLICAS if case.mesh else ""
    lower = "; ".join(filter(None, [f"not full: {case.not_full}", left]))
    expected = {(level, left)}
    if level == "full" and case.not_full:
        expected.add(("copies", lower))
    found = {receipt[2:] for receipt in attached.receipts if receipt.taken != "torch"}
    assert found <= expected, (name, found)
    assert not (expected - found) or case.not_full, (name, found)
    taken = {r.operation: r.taken for comm in attached.communicators for r in comm.receipts()}
    assert taken["reduce_scatter"] in ("direct", "inline"), (name, taken)
    if level != "full" or case.not_full:
        assert taken["all_gather"] == "window", (name, taken)
    else:
        assert "all_gather" not in taken, (name, taken)


def train_all(cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    for name in cases:
        case = (CASES | CASES_OF_4)[name]
        sizes = case.mesh or (ranks,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
        theirs = train(make(case, mesh), case)
        for level in LEVELS:
            net = make(case, mesh)
            attached = fsdp2.attach(net, level=level)
            case.attached(net)
            ours = train(net, case)
            tolerance = case.tolerance or (0.0 if ranks == 2 else 2e-6)
            check_same(f"{name}, {level}", ours, theirs, tolerance)
            check_receipts(name, case, level, attached)
            attached.detach()
    dist.destroy_process_group()


@pytest.mark.covers("FSDP2 attached")
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, [*CASES]), (3, ["blocks", "groups", "bf16", "frozen", "Shard(1)"]), (4, [*CASES_OF_4])],
)
def test_training_equals_plain_fsdp2(ranks: int, cases: list[str]) -> None:
    launch(train_all, ranks, (cases,), timeout_s=240)


def train_before_and_after() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for level in LEVELS:
        attach_and_detach(level)
    dist.destroy_process_group()


def attach_and_detach(level: Level) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    case = Case()
    plain, net, other = (make(case, mesh) for _ in range(3))
    optimizers = [optimizer_of(each) for each in (plain, net, other)]
    before, others = comms_of(net), comms_of(other)

    def step_all(seed: int) -> None:
        losses = [step(*each, seed) for each in zip((plain, net, other), optimizers, strict=True)]
        assert len(set(losses)) == 1, (level, seed, losses)

    step_all(0)
    attached = fsdp2.attach(net, level=level)
    assert all(now is not then for now, then in zip(comms_of(net), before, strict=True))
    for seed in (1, 2, 3):
        step_all(seed)
    assert all(now is then for now, then in zip(comms_of(other), others, strict=True))
    attached.detach()
    assert all(now is then for now, then in zip(comms_of(net), before, strict=True))
    assert {receipt[2:] for receipt in attached.receipts} == {("torch", "it is detached")}
    step_all(4)
    attached.detach()  # does nothing

    again = fsdp2.attach(net, level=level)
    step_all(5)
    theirs = DefaultAllGather()
    net.set_custom_all_gather(theirs)
    step_all(6)
    assert "its all-gather has been replaced" in again.receipts[0].reason
    again.detach()
    assert comms_of(net)[0] is theirs, "what was set since stays"
    step_all(7)


def comms_of(net: nn.Module) -> list[object]:
    groups = [group for module in fsdp_modules(net) for group in internals.param_groups(module)]
    return [c for group in groups for c in (group._all_gather_comm, group._reduce_scatter_comm)]


def test_detach_gives_back_what_was_there_before() -> None:
    launch(train_before_and_after, 2, timeout_s=60)


def windows() -> list[int]:
    """Bytes of each mapping of shared memory in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:shardcomm" in line]
    return [int(end, 16) - int(start, 16) for start, end in spans]


def held() -> dict[str, int]:
    """What this process holds that an attachment could have left."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "windows": len(windows()),
        "kernels": len(torch.library._impls),
        "tensors": sum(isinstance(each, torch.Tensor) for each in objects),
        "objects": len(objects),
    }


def attach_a_hundred_times(level: Level) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = make(Case(), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(net)
    functions = dict(vars(internals.torchs_gather))
    before: dict[str, int] = {}
    for i in range(121):
        attached = fsdp2.attach(net, level=level)
        if i % 10 == 0:
            step(net, optimizer, i)
            assert windows()
        attached.detach()
        del attached
        if i == 20:  # torch has filled its caches
            before = held()
    after = held()
    after["objects"] -= 50  # less than one for each attachment is somebody else's
    left = {what: after[what] - before[what] for what in before if after[what] > before[what]}
    assert not left, f"{level}: beside {before} there are more, of objects 50 left out: {left}"
    assert not windows()
    assert dict(vars(internals.torchs_gather)) == functions
    dist.destroy_process_group()


@pytest.mark.parametrize("level", LEVELS)
def test_attaching_a_hundred_times_leaves_nothing(level: Level) -> None:
    launch(attach_a_hundred_times, 2, (level,), timeout_s=60)


def count_windows() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for level in LEVELS:
        net = make(Case(), mesh)
        optimizer = optimizer_of(net)
        attached = fsdp2.attach(net, level=level)
        step(net, optimizer, 0)
        step(net, optimizer, 1)
        steady = sorted(windows())
        # The control block, one page for each pool's word, two regions a rank for reduces, and for gathers three
        # windows, or one for each module.
        gathers = len(fsdp_modules(net)) if level == "full" else 3
        assert len(steady) <= 1 + 2 + 2 + gathers, (level, steady)
        for seed in range(2, 6):
            step(net, optimizer, seed)
            with torch.no_grad():
                net(torch.ones(2, 5))
            assert sorted(windows()) == steady
        attached.detach()
    dist.destroy_process_group()


def test_steps_make_no_memory_after_the_first() -> None:
    launch(count_windows, 2, timeout_s=60)


def save_and_load(directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = make(Case(), mesh)
    optimizer = optimizer_of(net)
    attached = fsdp2.attach(net)
    step(net, optimizer, 0)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    expected = [step(net, optimizer, seed) for seed in (1, 2)]

    for ours in (True, False):
        resumed = make(Case(), mesh)
        optimizer_again = optimizer_of(resumed)
        attached_again = fsdp2.attach(resumed) if ours else None
        model_state, optimizer_state = get_state_dict(resumed, optimizer_again)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=directory)
        set_state_dict(
            resumed,
            optimizer_again,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert [step(resumed, optimizer_again, seed) for seed in (1, 2)] == expected
        if attached_again is not None:
            attached_again.detach()
    attached.detach()
    dist.destroy_process_group()


@pytest.mark.covers("FSDP2 attached")
def test_checkpoints_go_between_attached_and_plain_models(tmp_path: Path) -> None:
    launch(save_and_load, 2, (str(tmp_path),), timeout_s=60)


def receipts_and_errors() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "alone"))

    with pytest.raises(ValueError, match="model \\(Net\\) has no FSDP modules; call torch"):
        fsdp2.attach(Net())
    ours = Net()
    engine = shardcomm_fully_shard(ours, mesh["replicas"])
    with pytest.raises(
        ValueError, match=r"model \(Net\) is sharded by shardcomm.fully_shard, whose"
    ):
        fsdp2.attach(ours)
    engine.close()
    with pytest.raises(TypeError, match=r"model is a SGD; it must be a torch.nn.Module"):
        fsdp2.attach(torch.optim.SGD(ours.parameters()))  # type: ignore[arg-type]

    net = Net()
    for part in (net.embed, *net.blocks):
        fully_shard(part, mesh=mesh["replicas"])
    fully_shard(net.head, mesh=mesh["alone"])
    fully_shard(net, mesh=mesh["replicas"])
    with pytest.raises(ValueError, match="level is 'fastest'; accepted: 'full', 'copies', 'hooks'"):
        fsdp2.attach(net, level="fastest")  # type: ignore[arg-type]
    attached = fsdp2.attach(net, level="hooks")
    assert {receipt.module: receipt[1:] for receipt in attached.receipts} == {
        "": ("hooks", "torch", "it has no parameters of its own to communicate"),
        "embed": ("hooks", "hooks", ""),
        "blocks.0": ("hooks", "hooks", ""),
        "blocks.1": ("hooks", "hooks", ""),
        "blocks.2": ("hooks", "hooks", ""),
        "head": ("hooks", "torch", "of one rank alone FSDP2 calls no collectives"),
    }
    assert "head      torch   of one rank alone" in str(attached)
    assert [comm.transport for comm in attached.communicators] == ["shm"]
    for whole_or_part in (net, net.embed):
        with pytest.raises(ValueError, match="is attached already; call detach"):
            fsdp2.attach(whole_or_part)
    attached.detach()

    (group,) = internals.param_groups(net.embed)
    group.device = torch.device("xpu")
    with pytest.raises(ValueError, match="module 'embed' is on xpu; supported: 'cpu', and 'cuda'"):
        fsdp2.attach(net)
    group.device = torch.device("cpu")
    comm = vars(group).pop("_all_gather_comm")
    with pytest.raises(RuntimeError, match="FSDP2 have no _all_gather_comm; use a torch that"):
        fsdp2.attach(net)
    group._all_gather_comm = comm
    fsdp2.attach(net).detach()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(introduction, "host_identity", lambda: f"host {dist.get_rank()}")
        attached = fsdp2.attach(net)
    assert attached.receipts[1][2:] == (
        "torch",
        "its ranks are on several hosts, and from a CPU only torch's collectives reach past one",
    )
    attached.detach()

    if hasattr(_fsdp_common, "ShardPlacementResult"):  # torch 2.11 has none
        halves = Even()
        placement, elsewhere = (
            _fsdp_common.ShardPlacementResult(
                Shard(0), _fsdp_common.FSDPMeshInfo(mesh[name], shard_mesh_dim=0)
            )
            for name in ("replicas", "alone")
        )
        fully_shard(
            halves,
            mesh=mesh["replicas"],
            shard_placement_fn=lambda p: placement if p is halves[0].weight else elsewhere,
        )
        (receipt,) = fsdp2.attach(halves).receipts
        assert receipt.taken == "torch"
        assert receipt.reason.startswith("it has 2 parameter groups, and FSDP2 takes custom")
    dist.destroy_process_group()


def test_receipts_say_what_is_in_force_and_errors_what_to_do() -> None:
    launch(receipts_and_errors, 2, timeout_s=60)


def run_different_blocks() -> None:
    dist.init_process_group("gloo")
    net = make(CASES["blocks"], init_device_mesh("cpu", (dist.get_world_size(),)))
    fsdp2.attach(net, level="copies")
    with pytest.raises(CommError, match=r"(?s)of module 'blocks.[01]'.*of module 'blocks.[01]'"):
        net.blocks[dist.get_rank()](torch.ones(2, WIDTH))
    dist.destroy_process_group()


def test_ranks_that_gather_different_blocks_of_equal_size_are_told() -> None:
    launch(run_different_blocks, 2, timeout_s=60)


EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_attach.py"


def run_example() -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_example_runs() -> None:
    launch(run_example, 2, timeout_s=60)
