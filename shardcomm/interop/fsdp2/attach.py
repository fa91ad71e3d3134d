"""`attach`: gives each FSDP module of a model the level that it can have, with a receipt that says which."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from shardcomm.arguments.checks import check_type
from shardcomm.comm.communicator import Communicator
from shardcomm.engine.sharded_modules import is_sharded
from shardcomm.interop.fsdp2.copies import GroupCopies
from shardcomm.interop.fsdp2.full import FullGather, has_gather
from shardcomm.interop.fsdp2.group_communicators import GroupCommunicators
from shardcomm.interop.fsdp2.hooks import GroupAllGather, GroupReduceScatter
from shardcomm.interop.fsdp2.internals import FSDPModule, difference, param_groups
from shardcomm.stream.streams import uses_core

Level = Literal["full", "copies", "hooks"]
"""How much of FSDP2's communication is replaced: "hooks" its collectives, "copies" also its copies into and out of
communication memory, and "full" the whole gather."""


class ModuleReceipt(NamedTuple):
    """How one FSDP module communicates.

    Attributes:
        module: The module's name in the model; "" is the model itself.
        requested: The level that was asked for.
        taken: The level in force: "full", "copies", "hooks", or "torch" where nothing was changed.
        reason: What stays torch's, and why; "" if nothing does.
    """

    module: str
    requested: str
    taken: str
    reason: str


class Attached:
    """A model to which `attach` has given shardcomm's communication. `str()` of it is a table of the receipts."""

    def __init__(
        self,
        level: Level,
        modules: dict[str, _AttachedGroup | str],
        communicators: GroupCommunicators,
    ) -> None:
        self._level = level
        self._modules = modules
        self._communicators = communicators

    @property
    def receipts(self) -> tuple[ModuleReceipt, ...]:
        """How each FSDP module communicates now. Level "full" is in force from a module's second gather on."""
        return tuple(
            ModuleReceipt(name, self._level, "torch", group)
            if isinstance(group, str)
            else ModuleReceipt(name, self._level, *group.taken())
            for name, group in self._modules.items()
        )

    @property
    def communicators(self) -> list[Communicator]:
        """The communicators, one for each process group in use.

        Their receipts say which path the latest collectives took.
        """
        return [group_comm.comm for group_comm in self._communicators]

    def detach(self) -> None:
        """Gives every module the communication that it had before, and frees the memory.

        Call it between steps, on every rank. A module that was given other collectives since `attach` keeps those. A
        second call does nothing.
        """
        groups = {id(group): group for group in self._modules.values()}
        for group in groups.values():
            if isinstance(group, _AttachedGroup):
                group.undo()
        self._modules = {
            name: "it is detached" if isinstance(group, _AttachedGroup) else group
            for name, group in self._modules.items()
        }
        self._communicators.close()

    def __str__(self) -> str:
        receipts = self.receipts
        names = [receipt.module or "(model)" for receipt in receipts]
        width = max(map(len, names))
        rows = zip(names, receipts, strict=True)
        return "\n".join(
            f"{name:{width}}  {receipt.taken:6}  {receipt.reason}".rstrip()
            for name, receipt in rows
        )


def attach(model: torch.nn.Module, *, level: Level = "full") -> Attached:
    """Gives every FSDP module of a model shardcomm's communication. Collective: all ranks of its mesh call it.

    Call it after torch's `fully_shard`, before or between steps. Results stay the same, up to the order of sums; sums
    of float16 and bfloat16 are taken in float32 and rounded once.

    It takes memory, which is allocated in the first steps. At level "full" a host holds the gathered parameters once,
    as long as they are attached, while FSDP2 holds those of a few modules on each rank. They are shared: a value that
    one rank writes into them is there on every rank. At the other levels, on a CPU, a host holds about three times what
    the largest module gathers. At each level a rank holds twice what the largest module reduces. With more prefetching
    it is more.

    Args:
        model: A model on which, or on parts of which, torch's `fully_shard` was called.
        level: How much is replaced: "full", "copies" or "hooks". A module that cannot have the level takes the next
            lower one.

    Returns:
        The attached model: its receipts, and `detach()`.

    Raises:
        TypeError: `model` is no module.
        ValueError: `level` is unknown, `model` has no FSDP modules, or a module is attached already or on a device that
            the compiled core does not drive.
        RuntimeError: This torch's FSDP2 is not one that shardcomm knows.
        CudaError: NCCL or CUDA refused, or is not there.
        CommError: A rank did not come.

    Example:
        ```python
        import torch, shardcomm.fsdp2
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        model = fully_shard(torch.nn.Linear(64, 64), mesh=mesh)
        attached = shardcomm.fsdp2.attach(model)
        model(torch.randn(8, 64)).sum().backward()
        print(attached)
        attached.detach()
        torch.distributed.destroy_process_group()
        ```

    References:
        `torch.distributed.fsdp.fully_shard`, and the methods `set_custom_all_gather` and `set_custom_reduce_scatter`
        of its FSDPModule.
    """
    if level not in get_args(Level):
        accepted = ", ".join(map(repr, get_args(Level)))
        raise ValueError(f"attach: level is {level!r}; accepted: {accepted}")
    check_type("attach", "model", model, nn.Module, "a torch.nn.Module")
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not modules and is_sharded(model):
        raise ValueError(
            f"attach: model ({type(model).__name__}) is sharded by shardcomm.fully_shard, whose communication is "
            "shardcomm's already: leave the call out; it is for models of torch.distributed.fsdp.fully_shard"
        )
    if not modules:
        raise ValueError(
            f"attach: model ({type(model).__name__}) has no FSDP modules; call "
            "torch.distributed.fsdp.fully_shard on it, or on its parts, first"
        )
    groups = {name: param_groups(module) for name, module in modules.items()}
    for name, of_module in groups.items():
        _check(name, of_module)

    communicators = GroupCommunicators([*modules])
    try:
        reasons = {
            name: _reason_against(of_module, communicators) for name, of_module in groups.items()
        }
    except BaseException:
        communicators.close()
        raise

    attached: dict[str, _AttachedGroup | str] = {}
    shared: dict[int, _AttachedGroup] = {}  # several modules may share a group: fully_shard([a, b])
    for name, module in modules.items():
        if reasons[name]:
            attached[name] = reasons[name]
            continue
        (group,) = groups[name]
        if id(group) not in shared:
            shared[id(group)] = _AttachedGroup(module, group, communicators, name, level)
        attached[name] = shared[id(group)]
    return Attached(level, attached, communicators)


class _AttachedGroup:
    """One parameter group, with shardcomm's collectives, copies and gather in place of its own."""

    def __init__(
        self,
        module: FSDPModule,
        param_group: Any,
        communicators: GroupCommunicators,
        name: str,
        level: Level,
    ) -> None:
        self._module = module
        self._param_group = param_group
        self._level = level
        self._before = param_group._all_gather_comm, param_group._reduce_scatter_comm
        self._full: FullGather | None = None
        self._copies = ours = None if level == "hooks" else GroupCopies(param_group.device.type)
        self._ours = (
            GroupAllGather(param_group, communicators, name, ours),
            GroupReduceScatter(param_group, communicators, name, ours),
        )
        module.set_custom_all_gather(self._ours[0])
        module.set_custom_reduce_scatter(self._ours[1])
        if level == "full" and not difference():
            self._full = FullGather(
                param_group, self._ours[0], self._before[0], communicators, name
            )

    def taken(self) -> tuple[str, str]:
        """The level in force, and a sentence about what stays torch's."""
        reasons = []
        taken: str = self._level
        if self._level == "full":
            against = difference() if self._full is None else self._full.reason
            if against:
                taken = "copies"
                reasons.append(f"not full: {against}")
        if self._full is None and self._param_group._all_gather_comm is not self._ours[0]:
            reasons.append("its all-gather has been replaced")
        if self._param_group._reduce_scatter_comm is not self._ours[1]:
            reasons.append("its reduce-scatter has been replaced")
        if getattr(self._param_group.mesh_info, "replicate_process_group", None) is not None:
            reasons.append(
                "the all-reduce between replicas stays torch's: FSDP2 has no hook for it"
            )
        return taken, "; ".join(reasons)

    def undo(self) -> None:
        if self._full is not None:
            self._full.close()
        if self._copies is not None:
            self._copies.close()
        if self._param_group._all_gather_comm is self._ours[0]:
            self._module.set_custom_all_gather(self._before[0])
        if self._param_group._reduce_scatter_comm is self._ours[1]:
            self._module.set_custom_reduce_scatter(self._before[1])


def _check(name: str, groups: list[Any]) -> None:
    for group in groups:
        comms = group._all_gather_comm, group._reduce_scatter_comm
        ours = any(isinstance(comm, GroupAllGather | GroupReduceScatter) for comm in comms)
        if ours or has_gather(group):
            raise ValueError(
                f"attach: module {name!r} is attached already; call detach() of what that attach returned first"
            )
        if not uses_core(group.device):
            raise ValueError(
                f"attach: module {name!r} is on {group.device}; supported: 'cpu', and 'cuda' where shardcomm was built "
                "with CUDA (see `shardcomm doctor`)"
            )


def _reason_against(groups: list[Any], communicators: GroupCommunicators) -> str:
    """Why a module's collectives stay torch's; "" if they need not. Connects the module's process group."""
    if not groups:
        return "it has no parameters of its own to communicate"
    if len(groups) > 1:
        return f"it has {len(groups)} parameter groups, and FSDP2 takes custom collectives for one only"
    (group,) = groups
    if not hasattr(group.mesh_info, "shard_process_group"):
        return "its parameters are replicated, and not sharded"
    shard_group = group.mesh_info.shard_process_group
    if shard_group.size() == 1:
        return "of one rank alone FSDP2 calls no collectives"
    return communicators.refused(shard_group, group.device)
