"""Level "full": the gather of a parameter group without a copy into a slot, and without any copy out of it.

A group's window, at 3 ranks, of a parameter of 7 rows and one of 2; `-` is padding, as FSDP2 pads shards::

    written by rank   0 0 0 1 1 1 2 - -   0 1 -
    window            [    weight   ]     [b]       shared by all ranks of the host, there as long as attached

Each rank casts its shards straight to where they belong, and the full parameters are views of the window for good.
FSDP2's own functions go on around that: which parameter a module shows, prefetch, gradients, checkpoints.

    torch    shards --cast--> . --copy in--> slot --all-gather--> slots --copy out--> parameters
    full     shards --cast--> parameters

A group's first gather is torch's, beside ours, and both must be the same bit for bit; else torch's stays. So it does
where `FullGather` has a reason against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist

from shardcomm.arguments.dtype import FLOATS
from shardcomm.copy.plan import CopyPlan
from shardcomm.interop.fsdp2.internals import AllGather, AllGatherResult, torchs_gather
from shardcomm.interop.fsdp2.links import Link, Links
from shardcomm.interop.fsdp2.patch import Patch, Undo
from shardcomm.stream.streams import compute_stream

_ALIGNMENT = 128  # bytes: the parameters start as torch's allocators start them
_OWN = "_shardcomm_gather"  # of a group's first FSDPParam
_UNCHECKED = "its first gather is torch's, and ours is held against it"


class _Result(AllGatherResult):
    """What FSDP2 keeps between a gather and its copy-out; `gather` is whose it is."""

    gather: FullGather


class _Window(NamedTuple):
    """The full parameters of a group, padded."""

    flat: torch.Tensor
    params: list[torch.Tensor]
    """Flat, each with a storage that begins where it does: FSDP2 takes its parameters from there."""
    pack: CopyPlan


class FullGather:
    """The gather of one parameter group.

    `reason`: why it is torch's for now, or for good; "" while the parameters are views of the window.
    """

    def __init__(
        self, param_group: Any, comm: AllGather, before: AllGather, links: Links, tag: int
    ) -> None:
        self._param_group = param_group
        self._comm = comm
        self._before = before
        self._links = links
        self._tag = tag
        self._window: _Window | None = None
        self._checked = False
        self.reason = _UNCHECKED
        self._end = finalize(self, patch.take())
        vars(param_group.fsdp_params[0])[_OWN] = (
            self  # FSDP2 hands over no more than the parameters
        )

    def gather(self, torchs: Callable[..., Any], *args: Any) -> Any:
        """As `foreach_all_gather`, which is `torchs`."""
        *others, comm = args
        if comm is not self._comm:  # somebody set another
            self.give_back("its all-gather has been replaced")
        if self._checked and self.reason:
            return torchs(*args)
        if self._checked:
            return self._mark(self._gather(*others[-3:]))
        return self._mark(_Result(*torchs(*others, self._before)))

    def copy_out(
        self, torchs: Callable[..., None], result: _Result, *args: Any, **options: Any
    ) -> None:
        """As `foreach_all_gather_copy_out`, which is `torchs`."""
        if not self.reason:
            module = torch.get_device_module(self._param_group.device)
            module.current_stream().wait_event(result.all_gather_event)
            return
        torchs(result, *args, **options)
        if self._checked:
            return
        self._checked = True
        # What is made here outlives the gather, whatever mode that is in.
        with torch.inference_mode(False), torch.no_grad():
            self.reason = _reason_against(self._param_group, self._link()) or self._adopt()

    def give_back(self, reason: str) -> None:
        """Makes the parameters torch's again, while they are sharded."""
        self._checked, before, self.reason = True, self.reason, reason
        if not before:
            with torch.inference_mode(False), torch.no_grad():
                for param in self._param_group.fsdp_params:
                    _renew(param, [])
        self._window = None

    def close(self) -> None:
        """As `give_back`, in whatever state the parameters are."""
        if not self.reason:
            self._param_group.wait_for_unshard()
            self._param_group._to_sharded()  # `reshard` would not, where an error left a forward half done
        self.give_back("it is detached")
        del vars(self._param_group.fsdp_params[0])[_OWN]
        self._end()

    def _link(self) -> Link:
        group = self._param_group
        return self._links.get(group._all_gather_process_group, group.device)

    def _gather(self, copy_in_stream: Any, gather_stream: Any, device: torch.device) -> _Result:
        module = torch.get_device_module(device)
        # What this rank computed with the parameters comes before what the others write, and so all before all.
        copy_in_stream.wait_stream(module.current_stream())
        with module.stream(copy_in_stream):
            self._pack()
        gather_stream.wait_stream(copy_in_stream)
        assert self._window is not None
        event = gather_stream.record_event()
        return _Result(self._window.flat, event, None, [], [], [])

    def _pack(self) -> None:
        """Every rank its shards, between a meeting after which nobody reads and one after which all is written."""
        link, window = self._link(), self._window
        assert window is not None
        shards = [param._sharded_param_data for param in self._param_group.fsdp_params]
        stream = None if link.comm.device.type == "cpu" else compute_stream(link.comm.device)
        link.comm.barrier(tag=self._tag, stream=stream)
        window.pack.run(shards, [window.flat], threads=torch.get_num_threads())
        link.comm.barrier(tag=self._tag, stream=stream)

    def _adopt(self) -> str:
        """Shows the window's parameters, if they are those that torch gathered; else why not."""
        link = self._link()
        params = self._param_group.fsdp_params
        self._window = window = _window(params, link)
        self._pack()
        torchs = [param.all_gather_outputs[0] for param in params]
        same = torch.tensor(
            [all(map(_same_bits, window.params, torchs))],
            dtype=torch.int32,
            device=link.comm.device,
        )
        link.comm.all_reduce(same, "min")
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
    """Whether a `FullGather` is there, even if other collectives have been set since."""
    return any(_OWN in vars(param) for param in param_group.fsdp_params)


def _reason_against(param_group: Any, link: Link) -> str:
    """Why the parameters of a group cannot be views of a window; "" if they can. The same on every rank."""
    params = param_group.fsdp_params
    dtypes = {_dtypes(param) for param in params}
    reasons = {
        f"over {link.comm.transport} no rank can write into the memory of all": not link.shares_windows,
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


def _window(params: Sequence[Any], link: Link) -> _Window:
    stored, dtype = _dtypes(params[0])
    ranks, rank = link.comm.size, link.comm.rank
    per_rank = [param._sharded_param_data.numel() for param in params]
    unit = max(1, _ALIGNMENT // dtype.itemsize)
    offsets, end = [], 0
    for numel in per_rank:
        offsets.append(end)
        end += -(-numel * ranks // unit) * unit
    flat = link.comm.allocate(end, dtype=dtype, use="gather")
    full = [
        torch.utils.dlpack.from_dlpack(flat[offset : offset + numel * ranks])
        for offset, numel in zip(offsets, per_rank, strict=True)
    ]
    own = [offset + numel * rank for offset, numel in zip(offsets, per_rank, strict=True)]
    return _Window(flat, full, CopyPlan.pack(per_rank, own, stored, dtype))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _renew(param: Any, gathered: list[torch.Tensor]) -> None:
    """Puts `param`'s full parameter over `gathered`, or if that is empty over memory as FSDP2 makes it.

    FSDP2 frees and makes memory by the size of the storages of `all_gather_outputs`; ours are not among them. The
    parameter stays the same object: a forward's graph may wait to give it gradients, and it may have hooks.
    """
    before = vars(param).pop("_unsharded_param", None)
    param.all_gather_outputs = gathered
    if not gathered:
        shard = param._sharded_param_data
        ranks = param.mesh_info.shard_mesh_size
        param.init_all_gather_outputs([shard.numel()], [_dtypes(param)[1]], ranks, param.device)
    param.init_unsharded_param()
    if (
        before is not None and not before.is_inference()
    ):  # which no graph knows, and stays so for good
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
"""Has FSDP2 ask a `FullGather`, for parameters that have one."""
