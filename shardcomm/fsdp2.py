"""The collectives of a model that torch's `fully_shard` (FSDP2) has sharded, made ours by one line, and torch's again
by another::

    attached = shardcomm.fsdp2.attach(model)    # after fully_shard, before or between steps; every rank
    ...                                         # the loop stays as it is
    attached.detach()

Through FSDP2's public hooks (level "hooks"):

    sharded parameters --copy-in--> own slot of a window --all-gather--> window --copy-out--> parameters
    gradients ---------chunk_cat--> reduce memory --reduce-scatter--> sharded gradients

The window is shared by all ranks of the host, so once each has copied its shard in, the gather is only a meeting: no
byte moves. Both arrows into communication memory and the copy-out are FSDP2's own.

What has no hook stays torch's: HSDP's all-reduce between replicas, and modules of several parameter groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
except ImportError as error:
    raise ImportError(
        f"shardcomm.fsdp2: torch {torch.__version__} has no FSDP2 that takes custom collectives; install torch 2.13"
    ) from error

from shardcomm.buffer_pool import BufferPool
from shardcomm.communicator import Communicator, ReduceOp, Use
from shardcomm.dtype import movable
from shardcomm.streams import uses_core

Level = Literal["hooks"]

# What we read of a parameter group, besides setting its collectives through FSDPModule's methods.
_INTERNALS = {
    "_all_gather_comm",
    "_all_gather_process_group",
    "_reduce_scatter_comm",
    "_reduce_scatter_process_group",
    "device",
    "mesh_info",
}


class ModuleReceipt(NamedTuple):
    """How one FSDP module communicates; `reason` says what stays torch's, and why."""

    module: str
    """Its name in the model; "" is the model itself."""
    requested: str
    taken: str
    """The level in force: "hooks", or "torch" where nothing was changed."""
    reason: str


class Attached:
    """What `attach` did. `str()` of it is a table of the receipts."""

    def __init__(self, receipts: list[ModuleReceipt], hooked: list[_Hooked], links: _Links) -> None:
        self.receipts = tuple(receipts)
        self._hooked = hooked
        self._links = links

    @property
    def communicators(self) -> list[Communicator]:
        """One for each process group in use; their receipts say which path the latest collectives took."""
        return [link.comm for link in self._links]

    def detach(self) -> None:
        """Gives every module the collectives that it had before, and the memory back. Between steps; on every rank.

        A module that was given others since keeps those. A second call does nothing.
        """
        for hooked in self._hooked:
            hooked.undo()
        self._hooked.clear()
        self._links.close()

    def __str__(self) -> str:
        names = [receipt.module or "(model)" for receipt in self.receipts]
        width = max(map(len, names))
        rows = zip(names, self.receipts, strict=True)
        return "\n".join(
            f"{name:{width}}  {receipt.taken:5}  {receipt.reason}".rstrip()
            for name, receipt in rows
        )


def attach(model: torch.nn.Module, *, level: Level = "hooks") -> Attached:
    """Makes the collectives of every FSDP module of `model` ours. Collective: all ranks of its mesh call it.

    Results stay the same, up to the order of sums; sums of f16 and bf16 are taken in f32 and rounded once.
    Communication memory is made in the first steps: on a CPU about three times what the largest module gathers, a
    host, and twice what it reduces, a rank; more where more is prefetched.

    Raises:
        ValueError: `level` is unknown, `model` has no FSDP modules, one is attached already, or is on a device that the
            compiled core does not drive.
        RuntimeError: this torch's FSDP2 is not one that we know.
        CudaError: NCCL or CUDA refused, or is not there.
        CommError: a rank did not come.
    """
    if level not in get_args(Level):
        accepted = ", ".join(map(repr, get_args(Level)))
        raise ValueError(f"attach: level is {level!r}; accepted: {accepted}")
    modules = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not modules:
        raise ValueError(
            f"attach: model ({type(model).__name__}) has no FSDP modules; call "
            "torch.distributed.fsdp.fully_shard on it, or on its parts, first"
        )
    groups = {name: _param_groups(module) for name, module in modules.items()}
    for name, param_groups in groups.items():
        _check(name, param_groups)

    links = _Links()
    try:
        reasons = {
            name: _reason_against(param_groups, links) for name, param_groups in groups.items()
        }
    except BaseException:
        links.close()
        raise

    receipts: list[ModuleReceipt] = []
    hooked: dict[int, _Hooked] = {}  # several modules may share a group: fully_shard([a, b])
    for tag, (name, module) in enumerate(modules.items()):
        if reasons[name]:
            receipts.append(ModuleReceipt(name, level, "torch", reasons[name]))
            continue
        (group,) = groups[name]
        if id(group) not in hooked:
            hooked[id(group)] = _Hooked(module, group, links, tag)
        receipts.append(ModuleReceipt(name, level, level, _left_to_torch(group)))
    return Attached(receipts, list(hooked.values()), links)


class _Link:
    """A process group's ranks, and communication memory between them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # Ranks that only torch reaches gain nothing from us: such a group is refused, with the reason.
        transport: Literal["shm", "nccl"] = "shm" if device.type == "cpu" else "nccl"
        self.comm = Communicator.from_process_group(group, device=device, transport=transport)
        self._pools: dict[Use, BufferPool] = {}
        if transport == "shm":
            self._pools = {use: BufferPool(self.comm, use) for use in ("gather", "reduce")}

    def allocate(self, numel: int, dtype: torch.dtype, use: Use) -> torch.Tensor:
        if use in self._pools:
            return self._pools[use].take(numel, dtype)
        # Torch's allocator knows on which of FSDP2's streams memory is made and let go of.
        return torch.empty(numel, dtype=dtype, device=self.comm.device)

    def collective(self, use: Use) -> AbstractContextManager[None]:
        return self._pools[use].collective() if use in self._pools else nullcontext()

    def close(self) -> None:
        self._pools.clear()
        self.comm.close()


class _Links:
    """One link for each process group; made when first asked for, by all its ranks."""

    def __init__(self) -> None:
        self._of_group: dict[dist.ProcessGroup, _Link] = {}
        self._refused: dict[dist.ProcessGroup, str] = {}

    def get(self, group: dist.ProcessGroup, device: torch.device) -> _Link:
        if group not in self._of_group:
            self._of_group[group] = _Link(group, device)
        return self._of_group[group]

    def refused(self, group: dist.ProcessGroup, device: torch.device) -> str:
        """Why there is no link between the ranks of `group`; "" if there is one."""
        if group not in self._refused:
            self._refused[group] = ""
            try:
                self.get(group, device)
            except ValueError:
                if device.type != "cpu":
                    raise
                self._refused[group] = (
                    "its ranks are on several hosts, and from a CPU only torch's collectives reach past one"
                )
        return self._refused[group]

    def __iter__(self) -> Iterator[_Link]:
        return iter(self._of_group.values())

    def close(self) -> None:
        for link in self:
            link.close()
        self._of_group.clear()


class _AllGather(AllGather):
    """The all-gather of one parameter group, where FSDP2 calls it: on a GPU on its current stream, on a CPU at once.

    There `async_op` would gain nothing: no byte is left to move.
    """

    def __init__(self, param_group: Any, links: _Links, tag: int) -> None:
        self._param_group = param_group
        self._links = links
        self._tag = tag

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # With an int `reshard_after_forward` it is another group in backward; FSDP2 does not say which here.
        link = self._links.get(self._param_group._all_gather_process_group, device)
        return link.allocate(math.prod(map(int, size)), dtype, "gather")

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        link = self._links.get(group, output_tensor.device)
        with link.collective("gather"):
            link.comm.all_gather(movable(output_tensor), movable(input_tensor), tag=self._tag)


class _ReduceScatter(ReduceScatter):
    """The reduce-scatter of one parameter group."""

    def __init__(self, param_group: Any, links: _Links, tag: int) -> None:
        self._param_group = param_group
        self._links = links
        self._tag = tag
        self._input_numel = 0  # of the reduce whose output is not allocated yet

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """FSDP2 asks twice for each reduce: for its input, then for its output."""
        numel = math.prod(map(int, size))
        group = self._param_group._reduce_scatter_process_group
        if self._input_numel and numel * group.size() == self._input_numel:
            self._input_numel = 0
            # It becomes the gradients, which live on.
            return torch.empty(numel, dtype=dtype, device=device)
        self._input_numel = numel
        return self._links.get(group, device).allocate(numel, dtype, "reduce")

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        link = self._links.get(group, output_tensor.device)
        ours, factor = _reduction(op)
        if factor is not None:
            input_tensor.mul_(factor)
        with link.collective("reduce"):
            link.comm.reduce_scatter(output_tensor, input_tensor, ours, tag=self._tag)


class _Hooked:
    """One parameter group with our collectives in place of those it had."""

    def __init__(self, module: FSDPModule, param_group: Any, links: _Links, tag: int) -> None:
        self._module = module
        self._param_group = param_group
        self._before = param_group._all_gather_comm, param_group._reduce_scatter_comm
        self._ours = _AllGather(param_group, links, tag), _ReduceScatter(param_group, links, tag)
        module.set_custom_all_gather(self._ours[0])
        module.set_custom_reduce_scatter(self._ours[1])

    def undo(self) -> None:
        if self._param_group._all_gather_comm is self._ours[0]:
            self._module.set_custom_all_gather(self._before[0])
        if self._param_group._reduce_scatter_comm is self._ours[1]:
            self._module.set_custom_reduce_scatter(self._before[1])


def _param_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's parameter groups of one module; RuntimeError if this torch keeps them elsewhere."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        groups = list(state._fsdp_param_groups)
    else:  # torch 2.11: one at most. Neither: `state`, which has nothing of what is needed.
        only = getattr(state, "_fsdp_param_group", state)
        groups = [] if only is None else [only]
    for group in groups:
        missing = _INTERNALS - {*dir(type(group)), *vars(group)}
        if missing:
            raise RuntimeError(
                f"attach: parameter groups of torch {torch.__version__}'s FSDP2 have no {', '.join(sorted(missing))}; "
                "use a torch that shardcomm is tested with (2.13), or leave the model as it is"
            )
    return groups


def _check(name: str, groups: list[Any]) -> None:
    for group in groups:
        comms = group._all_gather_comm, group._reduce_scatter_comm
        if any(isinstance(comm, _AllGather | _ReduceScatter) for comm in comms):
            raise ValueError(
                f"attach: module {name!r} is attached already; call detach() of what that attach returned first"
            )
        if not uses_core(group.device):
            raise ValueError(
                f"attach: module {name!r} is on {group.device}; supported: 'cpu', and 'cuda' where shardcomm was built "
                "with CUDA (see `shardcomm doctor`)"
            )


def _reason_against(groups: list[Any], links: _Links) -> str:
    """Why a module's collectives stay torch's; "" if nothing speaks against ours. Links its process group."""
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
    return links.refused(shard_group, group.device)


def _left_to_torch(group: Any) -> str:
    if getattr(group.mesh_info, "replicate_process_group", None) is None:
        return ""
    return "the all-reduce between replicas stays torch's: FSDP2 has no hook for it"


def _reduction(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> tuple[ReduceOp, Any]:
    """Our name of `op`, and the factor that goes before it (None: none)."""
    if op == dist.ReduceOp.SUM:
        return "sum", None
    if op == dist.ReduceOp.AVG:
        return "avg", None
    if op == dist.ReduceOp.PREMUL_SUM:
        premultiplied: Any = op
        return "sum", premultiplied.__getstate__()[1]  # (kind, factor)
    raise ValueError(f"reduce_scatter: op is {op}; accepted: SUM, AVG, PREMUL_SUM")
