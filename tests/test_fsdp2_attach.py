"""A model sharded by torch's FSDP2 trains the same with our collectives attached as with torch's own, on Gloo."""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from shardcomm import CommError, fsdp2, launch, rendezvous
from shardcomm.fsdp2 import internals

STEPS = 3
WIDTH = 12
BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)  # seven rows: uneven on 2, 3 and 4 ranks
        self.down = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))  # one row: most ranks have none

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Even(nn.Sequential):
    """Dims that divide by 2, 3 and 4, as torch demands of Shard(1)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 24, bias=False)
        )


def shard(net: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Each block, and the rest."""
    for block in getattr(net, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def shard_in_groups(net: Net, mesh: DeviceMesh, **options: Any) -> None:
    """Nested in a block, two blocks as one group, the first and last layer as one."""
    fully_shard(net.blocks[0].up, mesh=mesh, **options)
    fully_shard(net.blocks[0], mesh=mesh, **options)
    fully_shard([net.blocks[1], net.blocks[2]], mesh=mesh, **options)
    fully_shard([net.embed, net.head], mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def freeze(net: Net) -> None:
    net.embed.requires_grad_(False)
    net.blocks[1].requires_grad_(False)
    net.blocks[2].up.bias.requires_grad_(False)


def freeze_in_another_dtype(net: Net) -> None:
    """Gathered as bytes, since a group's dtypes differ."""
    for block in net.blocks:
        block.scale.requires_grad_(False)
        block.scale.data = block.scale.data.to(BF16)


def recompute(net: Net) -> None:
    for i, block in enumerate(net.blocks):
        net.blocks[i] = checkpoint_wrapper(block)


def prefetch(net: Net) -> None:
    first, second, third = fsdp_modules(net.blocks)
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    net.unshard(async_op=True)


def separate_reduce_group(net: Net) -> None:
    if hasattr(net, "set_separate_reduce_scatter_group"):
        net.set_separate_reduce_scatter_group(True)


def divide_by_three(net: Net) -> None:
    for module in fsdp_modules(net):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)


def multiply_before_the_sum(net: Net) -> None:
    """By PREMUL_SUM, which torch takes unless told otherwise, and Gloo does not have."""
    for module in fsdp_modules(net):
        module.set_force_sum_reduction_for_comms(False)


def fsdp_modules(net: nn.Module) -> list[FSDPModule]:
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


@dataclass(frozen=True)
class Case:
    """One way to use FSDP2. Without `tolerance` results are bitwise Gloo's at two ranks, and close to it beyond."""

    net: Callable[[], Any] = Net
    mesh: tuple[int, ...] = ()
    shard: Callable[..., None] = shard
    options: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Any], None] = lambda net: None
    after: Callable[[Any], None] = lambda net: None
    attached: Callable[[Any], None] = lambda net: None
    micro_batches: int = 1
    until_last: str = "set_requires_gradient_sync"
    tolerance: float | None = None


CASES = {
    "blocks": Case(),
    "groups": Case(shard=shard_in_groups),
    "kept after forward": Case(options={"reshard_after_forward": False}),
    "bf16": Case(options={"mp_policy": MixedPrecisionPolicy(BF16)}, tolerance=5e-3),
    "bf16, reduced in fp32": Case(
        options={"mp_policy": MixedPrecisionPolicy(BF16, torch.float32)}, tolerance=5e-3
    ),
    "reduced in fp16": Case(
        options={"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, tolerance=5e-3
    ),
    "frozen": Case(before=freeze),
    "frozen, another dtype": Case(before=freeze_in_another_dtype),
    "Shard(1)": Case(net=Even, options={"shard_placement_fn": lambda param: Shard(1)}),
    "accumulation": Case(micro_batches=3),
    "recomputed": Case(before=recompute),
    "prefetched": Case(after=prefetch),
    "separate reduce group": Case(after=separate_reduce_group),
    "divided by 3": Case(after=divide_by_three),
    "divided by 3 before the sum": Case(
        after=divide_by_three, attached=multiply_before_the_sum, tolerance=1e-5
    ),
    "offloaded": Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}
CASES_OF_4 = {
    "HSDP": Case(mesh=(2, 2)),
    "HSDP, bf16": Case(
        mesh=(2, 2), options={"mp_policy": MixedPrecisionPolicy(BF16)}, tolerance=5e-3
    ),
    "HSDP, accumulation": Case(mesh=(2, 2), micro_batches=2),
    "HSDP, accumulation of shards": Case(
        mesh=(2, 2), micro_batches=2, until_last="set_requires_all_reduce"
    ),
    "resharded to 2": Case(options={"reshard_after_forward": 2}),
}


def make(case: Case, mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    net = case.net()
    case.before(net)
    case.shard(net, mesh, **case.options)
    case.after(net)
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(
        trained, lr=0.05, momentum=0.9
    )  # unlike Adam, it shows a gradient's scale


def step(
    net: Any, optimizer: torch.optim.Optimizer, seed: int, case: Case = CASES["blocks"]
) -> float:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + seed)
    total = 0.0
    for i in range(case.micro_batches):
        getattr(net, case.until_last)(i == case.micro_batches - 1)
        width = 5 if isinstance(net, Net) else WIDTH
        loss = (net(torch.randn(4, width, generator=generator)) - 1).square().mean()
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return total


def full(net: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters. Each sharded one is gathered by DTensor, so by torch."""
    return {name: p.full_tensor().detach().clone() for name, p in net.state_dict().items()}


def train(net: Any, case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = optimizer_of(net)
    losses = [step(net, optimizer, seed, case) for seed in range(STEPS)]
    return losses, full(net)


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


def train_all(cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    for name in cases:
        case = (CASES | CASES_OF_4)[name]
        sizes = case.mesh or (ranks,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards")[-len(sizes) :])
        theirs = train(make(case, mesh), case)
        net = make(case, mesh)
        attached = fsdp2.attach(net)
        case.attached(net)
        ours = train(net, case)
        tolerance = case.tolerance or (0.0 if ranks == 2 else 2e-6)
        check_same(name, ours, theirs, tolerance)
        taken = {r.operation: r.taken for comm in attached.communicators for r in comm.receipts()}
        assert taken["all_gather"] == "window", (name, taken)
        assert taken["reduce_scatter"] == "direct", (name, taken)
        left = "the all-reduce between replicas stays torch's: FSDP2 has no hook for it"
        reasons = {receipt.reason for receipt in attached.receipts if receipt.taken == "hooks"}
        assert reasons == {left if case.mesh else ""}, (name, reasons)
        attached.detach()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_training_equals_plain_fsdp2(ranks: int) -> None:
    cases = [*CASES, *(CASES_OF_4 if ranks == 4 else ())]
    launch(train_all, ranks, (cases,), deadline_s=120)


def train_before_and_after() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    case = Case()
    plain, net, other = (make(case, mesh) for _ in range(3))
    optimizers = [optimizer_of(each) for each in (plain, net)]
    before = comms_of(net)
    others = comms_of(other)

    def step_both(seed: int) -> None:
        losses = [step(*each, seed) for each in zip((plain, net), optimizers, strict=True)]
        assert losses[0] == losses[1], (seed, losses)

    step_both(0)
    attached = fsdp2.attach(net)
    assert all(now is not then for now, then in zip(comms_of(net), before, strict=True))
    step_both(1)
    assert all(now is then for now, then in zip(comms_of(other), others, strict=True))
    attached.detach()
    assert all(now is then for now, then in zip(comms_of(net), before, strict=True))
    step_both(2)
    attached.detach()  # does nothing

    again = fsdp2.attach(net)
    step_both(3)
    theirs = DefaultAllGather()
    net.set_custom_all_gather(theirs)
    again.detach()
    assert comms_of(net)[0] is theirs, "what was set since stays"
    step_both(4)
    dist.destroy_process_group()


def comms_of(net: nn.Module) -> list[object]:
    groups = [group for module in fsdp_modules(net) for group in internals.param_groups(module)]
    return [c for group in groups for c in (group._all_gather_comm, group._reduce_scatter_comm)]


def test_detach_gives_back_what_was_there_before() -> None:
    launch(train_before_and_after, 2, deadline_s=60)


def windows() -> list[int]:
    """Bytes of each mapping of shared memory in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:shardcomm" in line]
    return [int(end, 16) - int(start, 16) for start, end in spans]


def attach_a_hundred_times() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = make(Case(), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(net)
    step(net, optimizer, 0)
    files = len(os.listdir("/proc/self/fd"))
    for i in range(100):
        attached = fsdp2.attach(net)
        if i % 10 == 0:
            step(net, optimizer, i)
            assert windows()
        attached.detach()
        assert not windows()
        assert len(os.listdir("/proc/self/fd")) <= files
    dist.destroy_process_group()


def test_attaching_a_hundred_times_leaves_nothing() -> None:
    launch(attach_a_hundred_times, 2, deadline_s=60)


def count_windows() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = make(Case(), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(net)
    attached = fsdp2.attach(net)
    step(net, optimizer, 0)
    step(net, optimizer, 1)
    steady = sorted(windows())
    # The control block, one page for each pool's word, three windows for gathers and two regions a rank for reduces.
    assert len(steady) <= 1 + 2 + 3 + 2, steady
    for seed in range(2, 6):
        step(net, optimizer, seed)
        with torch.no_grad():
            net(torch.ones(2, 5))
        assert sorted(windows()) == steady
    attached.detach()
    dist.destroy_process_group()


def test_steps_make_no_memory_after_the_first() -> None:
    launch(count_windows, 2, deadline_s=60)


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


def test_checkpoints_go_between_attached_and_plain_models(tmp_path: Path) -> None:
    launch(save_and_load, 2, (str(tmp_path),), deadline_s=60)


def receipts_and_errors() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "alone"))

    with pytest.raises(ValueError, match="model \\(Net\\) has no FSDP modules; call torch"):
        fsdp2.attach(Net())

    net = Net()
    for part in (net.embed, *net.blocks):
        fully_shard(part, mesh=mesh["replicas"])
    fully_shard(net.head, mesh=mesh["alone"])
    fully_shard(net, mesh=mesh["replicas"])
    with pytest.raises(ValueError, match="level is 'fastest'; accepted: 'hooks'"):
        fsdp2.attach(net, level="fastest")  # type: ignore[arg-type]
    attached = fsdp2.attach(net)
    assert {receipt.module: receipt[1:] for receipt in attached.receipts} == {
        "": ("hooks", "torch", "it has no parameters of its own to communicate"),
        "embed": ("hooks", "hooks", ""),
        "blocks.0": ("hooks", "hooks", ""),
        "blocks.1": ("hooks", "hooks", ""),
        "blocks.2": ("hooks", "hooks", ""),
        "head": ("hooks", "torch", "of one rank alone FSDP2 calls no collectives"),
    }
    assert "head      torch  of one rank alone" in str(attached)
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
        patch.setattr(rendezvous, "host_identity", lambda: f"host {dist.get_rank()}")
        attached = fsdp2.attach(net)
    assert attached.receipts[1][2:] == (
        "torch",
        "its ranks are on several hosts, and from a CPU only torch's collectives reach past one",
    )
    attached.detach()

    halves = Even()
    placement = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh["replicas"], shard_mesh_dim=0))
    elsewhere = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh["alone"], shard_mesh_dim=0))
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
    launch(receipts_and_errors, 2, deadline_s=60)


def run_different_blocks() -> None:
    dist.init_process_group("gloo")
    net = make(CASES["blocks"], init_device_mesh("cpu", (dist.get_world_size(),)))
    fsdp2.attach(net)
    with pytest.raises(CommError, match=r"tag 1.*tag 2|tag 2.*tag 1"):
        net.blocks[dist.get_rank()](torch.ones(2, WIDTH))
    dist.destroy_process_group()


def test_ranks_that_gather_different_blocks_of_equal_size_are_told() -> None:
    launch(run_different_blocks, 2, deadline_s=60)


EXAMPLE = Path(__file__).parents[1] / "examples" / "fsdp2_attach.py"


def run_example() -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def test_example_runs() -> None:
    launch(run_example, 2, deadline_s=60)
