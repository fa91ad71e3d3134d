"""Level "full": the gather of a parameter group without a copy into a slot, and without a copy out of it.

The window of a group on 3 ranks, with a parameter of 7 rows and one of 2; `-` is padding, as FSDP2 pads shards::

    written by rank   0 0 0 1 1 1 2 - -   0 1 -
    window            [    weight   ]     [b]       shared by all ranks of the host, there as long as attached

Each rank casts its shards straight to their places in the window, and the full parameters stay views of the window. The
rest goes on by FSDP2's own functions: which parameter a module shows, prefetch, gradients, checkpoints.

    torch    shards --cast--> . --copy in--> slot --all-gather--> slots --copy out--> parameters
    full     shards --cast--> parameters

A group's first gather is done by torch and by shardcomm, and both results must be the same bit for bit; otherwise
torch's gather stays. It also stays if `FullGather` has another reason against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist

from shardcomm.arguments.dtype import FLOATS
from shardcomm.copy.plan import CopyPlan
from shardcomm.interop.fsdp2.group_communicators import GroupCommunicator, GroupCommunicators
from shardcomm.interop.fsdp2.internals import AllGather, AllGatherResult, torchs_gather
from shardcomm.interop.fsdp2.patch import Patch, Undo
from shardcomm.stream.streams import compute_stream

_ALIGNMENT = 128  # bytes: the parameters start as torch's allocators start them
_OWN = "_shardcomm_gather"  # an attribute of a group's first FSDPParam
_UNCHECKED = "its first gather is torch's, and ours is held against it"


class _Result(AllGatherResult):
    """What FSDP2 keeps between a gather and its copy-out, and the `FullGather` that made it."""

    gather: FullGather


class _Window(NamedTuple):
    """The full parameters of a group, padded.

    Attributes:
        flat: All of them.
        params: Each of them, flat, with a storage that begins where it does: FSDP2 takes its parameters from there.
        pack: The plan that casts this rank's shards to their places.
    """

    flat: torch.Tensor
    params: list[torch.Tensor]
    pack: CopyPlan


class FullGather:
    """The gather of one parameter group.

    Attributes:
        reason: Why the gather is torch's, for now or for good; "" while the parameters are views of the window.
    """

    def __init__(
        self,
        param_group: Any,
        comm: AllGather,
        before: AllGather,
        communicators: GroupCommunicators,
        name: str,
    ) -> None:
        self._param_group = param_group
        self._comm = comm
        self._before = before
        self._communicators = communicators
        self._name = name
        self._window: _Window | None = None
        self._checked = False
        self.reason = _UNCHECKED
        self._end = finalize(self, patch.take())
        # On a parameter, since FSDP2 hands over nothing else to its gather.
        vars(param_group.fsdp_params[0])[_OWN] = self

    def gather(self, torchs: Callable[..., Any], *args: Any) -> Any:
        """Takes the place of FSDP2's `foreach_all_gather`, which is `torchs`."""
        *others, comm = args
        if comm is not self._comm:  # somebody has set another all-gather
            self.give_back("its all-gather has been replaced")
        if self._checked and self.reason:
            return torchs(*args)
        if self._checked:
            return self._mark(self._gather(*others[-3:]))
        return self._mark(_Result(*torchs(*others, self._before)))

    def copy_out(
        self, torchs: Callable[..., None], result: _Result, *args: Any, **options: Any
    ) -> None:
        """Takes the place of FSDP2's `foreach_all_gather_copy_out`, which is `torchs`."""
        if not self.reason:
            module = torch.get_device_module(self._param_group.device)
            module.current_stream().wait_event(result.all_gather_event)
            return
        torchs(result, *args, **options)
        if self._checked:
            return
        self._checked = True
        # Tensors that are made here outlive the gather, and so must not depend on the mode in which it is called.
        with torch.inference_mode(False), torch.no_grad():
            self.reason = _reason_against(self._param_group, self._group_comm()) or self._adopt()

    def give_back(self, reason: str) -> None:
        """Makes the parameters torch's again, while they are sharded."""
        self._checked, before, self.reason = True, self.reason, reason
        if not before:
            with torch.inference_mode(False), torch.no_grad():
                for param in self._param_group.fsdp_params:
                    _renew(param, [])
        self._window = None

    def close(self) -> None:
        """Ends the gather as `give_back` does, in whatever state the parameters are."""
        if not self.reason:
            self._param_group.wait_for_unshard()
            # Not `reshard`, which would do nothing if an error has left a forward half done.
            self._param_group._to_sharded()
        self.give_back("it is detached")
        del vars(self._param_group.fsdp_params[0])[_OWN]
        self._end()

    def _group_comm(self) -> GroupCommunicator:
        group = self._param_group
        return self._communicators.get(group._all_gather_process_group, group.device)

    def _gather(self, copy_in_stream: Any, gather_stream: Any, device: torch.device) -> _Result:
        module = torch.get_device_module(device)
        # This rank's earlier computation with the parameters must end before other ranks write them. Each rank sees to
        # it for itself, before they meet in `_pack`.
        copy_in_stream.wait_stream(module.current_stream())
        with module.stream(copy_in_stream):
            self._pack()
        gather_stream.wait_stream(copy_in_stream)
        assert self._window is not None
        event = gather_stream.record_event()
        return _Result(self._window.flat, event, None, [], [], [])

    def _pack(self) -> None:
        """Writes this rank's shards into the window.

        Before it the ranks meet, after which none reads any more; after it they meet again, when all have written.
        """
        group_comm, window = self._group_comm(), self._window
        assert window is not None
        shards = [param._sharded_param_data for param in self._param_group.fsdp_params]
        stream = (
            None if group_comm.comm.device.type == "cpu" else compute_stream(group_comm.comm.device)
        )
        group_comm.comm.barrier(tag=group_comm.tags[self._name], stream=stream)
        window.pack.run(shards, [window.flat], threads=torch.get_num_threads())
        group_comm.comm.barrier(tag=group_comm.tags[self._name], stream=stream)

    def _adopt(self) -> str:
        """Shows the window's parameters if they equal those that torch gathered.

        Returns:
            Why it does not; "" if it does.
        """
        group_comm = self._group_comm()
        params = self._param_group.fsdp_params
        self._window = window = _window(params, group_comm)
        self._pack()
        torchs = [param.all_gather_outputs[0] for param in params]
        same = torch.tensor(
            [all(map(_same_bits, window.params, torchs))],
            dtype=torch.int32,
            device=group_comm.comm.device,
        )
        group_comm.comm.all_reduce(same, "min")
        if not same.item():
            self._window = None
            return f"with torch {torch.__version__} our first gather was not the same as torch's"
        for param, full in zip(params, window.params, strict=True):
            _renew(param, [full])
        return ""

    def _mark(self, result: _Result) -> _Result:
        result.gather = self
        return result


def has_gather(param_group: Any) -> bool:
    """Whether the group has a `FullGather`, even if other collectives have been set since."""
    return any(_OWN in vars(param) for param in param_group.fsdp_params)


def _reason_against(param_group: Any, group_comm: GroupCommunicator) -> str:
    """Why the parameters of a group cannot be views of a window; "" if they can. The same on every rank."""
    params = param_group.fsdp_params
    dtypes = {_dtypes(param) for param in params}
    reasons = {
        f"over {group_comm.comm.transport} no rank can write into the memory of all": not group_comm.shares_windows,
        "after forward it is resharded to other ranks": param_group._use_post_forward_mesh,
        "a parameter is sharded on another dim than 0": any(
            param.fsdp_placement.dim != 0 for param in params
        ),
        "a parameter is a DTensor on another mesh, too": any(param.is_dtensor for param in params),
        "a parameter has a gather of its own (fsdp_pre_all_gather)": any(
            hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in params
        ),
        "an Embedding with max_norm writes into its parameter, which all ranks share": any(
            getattr(module, "max_norm", None) is not None
            for info in (param._module_info for param in params)
            for module in (info.module, *info.shared_modules)
        ),
        "its parameters have different dtypes": len(dtypes) > 1,
        "its parameters are not float32, bfloat16 or float16": not all(
            {*FLOATS}.issuperset(pair) for pair in dtypes
        ),
        "its shards are in the CPU's memory": param_group.device.type != "cpu"
        and any(param.offload_to_cpu for param in params),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _dtypes(param: Any) -> tuple[torch.dtype, torch.dtype]:
    stored = param._sharded_param_data.dtype
    return stored, param.param_dtype or stored


def _window(params: Sequence[Any], group_comm: GroupCommunicator) -> _Window:
    stored, dtype = _dtypes(params[0])
    ranks, rank = group_comm.comm.size, group_comm.comm.rank
    per_rank = [param._sharded_param_data.numel() for param in params]
    unit = max(1, _ALIGNMENT // dtype.itemsize)
    offsets, end = [], 0
    for numel in per_rank:
        offsets.append(end)
        end += -(-numel * ranks // unit) * unit
    flat = group_comm.comm.allocate(end, dtype=dtype, use="gather")
    full = [
        torch.utils.dlpack.from_dlpack(flat[offset : offset + numel * ranks])
        for offset, numel in zip(offsets, per_rank, strict=True)
    ]
    own = [offset + numel * rank for offset, numel in zip(offsets, per_rank, strict=True)]
    return _Window(flat, full, CopyPlan.pack(per_rank, own, stored, dtype))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _renew(param: Any, gathered: list[torch.Tensor]) -> None:
    """Puts `param`'s full parameter over `gathered`, or if that is empty, over memory that FSDP2 allocates.

    FSDP2 frees and allocates memory by resizing the storages of `all_gather_outputs`; the window is kept out of these.
    The parameter stays the same object, since a forward's graph may have to give it gradients, and it may have hooks.
    """
    before = vars(param).pop("_unsharded_param", None)
    param.all_gather_outputs = gathered
    if not gathered:
        shard = param._sharded_param_data
        ranks = param.mesh_info.shard_mesh_size
        param.init_all_gather_outputs([shard.numel()], [_dtypes(param)[1]], ranks, param.device)
    param.init_unsharded_param()
    # A tensor of inference mode is in no graph, and stays one of that mode.
    if before is not None and not before.is_inference():
        before.data = param._unsharded_param.data
        param._unsharded_param = before
    if gathered:
        param.all_gather_outputs = []
    else:
        param.free_unsharded_param()


def _apply() -> Undo:
    _torchs.update({name: getattr(torchs_gather, name) for name in _ours})
    vars(torchs_gather).update(_ours)
    return lambda: vars(torchs_gather).update(_torchs)


def _all_gather(fsdp_params: Sequence[Any], *args: Any) -> Any:
    gather: FullGather | None = vars(fsdp_params[0]).get(_OWN)
    torchs = _torchs["foreach_all_gather"]
    if gather is None:
        return torchs(fsdp_params, *args)
    return gather.gather(torchs, fsdp_params, *args)


def _copy_out(
    result: Any, fsdp_params: Sequence[Any], group: dist.ProcessGroup, **options: Any
) -> None:
    torchs = _torchs["foreach_all_gather_copy_out"]
    if not isinstance(result, _Result):
        torchs(result, fsdp_params, group, **options)
        return
    result.gather.copy_out(torchs, result, fsdp_params, group, **options)


_ours = {"foreach_all_gather": _all_gather, "foreach_all_gather_copy_out": _copy_out}
_torchs: dict[str, Any] = {}
patch = Patch(_apply)
"""Makes FSDP2 gather parameters that have a `FullGather` by that."""
