"""The two collectives of a hand-written FSDP loop, called as `torch.distributed` calls its own::

    dist.all_gather_into_tensor(full, shard)         shardcomm.all_gather_into_tensor(full, shard)
    dist.reduce_scatter_tensor(grad, full_grad)      shardcomm.reduce_scatter_tensor(grad, full_grad)

They do more than torch's: a gather converts to the output's dtype on the way, f16 and bf16 are summed in f32, and a
Communicator may be given as the group. Its `allocate` gives the memory in which they are fastest.
"""

from __future__ import annotations

from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardcomm.arguments.dtype import movable
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.operands import check_movable, resolved
from shardcomm.comm.rendezvous import backend_names, check_member
from shardcomm.comm.words import ReduceOp
from shardcomm.stream.streams import AnyStream
from shardcomm.stream.work import Work

Group = dist.ProcessGroup | Communicator | None
Op = dist.ReduceOp | dist.ReduceOp.RedOpType

OPS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}
"""Torch's reductions, by the names that a Communicator has for them."""


@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = ...,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Gathers a tensor of every rank into one tensor, in rank order; as the function of torch.distributed.

    Tensors may have any shapes and must be contiguous. They lie apart from each other, or in place as
    `Communicator.all_gather` takes them.

    Args:
        output_tensor: Where the ranks' tensors go: ranks * n elements. They are converted to its dtype.
        input_tensor: This rank's tensor, of n elements.
        group: A ProcessGroup or a Communicator. None: the default group. The first call with a ProcessGroup connects
            its ranks.
        async_op: Whether to return at once.

    Returns:
        With `async_op` the Work to wait for, else None.

    Raises:
        TypeError: An operand is no tensor, or is sparse or quantised; or `group` is neither of the two.
        ValueError: A tensor is on another device than the group, not contiguous, of another size, or overlaps the
            other; or there is no default group.
        CommError: A rank died, called something else or did not come in time.

    Example:
        ```python
        full = torch.empty(comm.size * 4)
        shardcomm.all_gather_into_tensor(full, torch.ones(4))
        ```
    """
    recv, send = _detached(
        "all_gather_into_tensor", ("output_tensor", output_tensor), ("input_tensor", input_tensor)
    )
    comm = _communicator("all_gather_into_tensor", group, send.device)
    if recv.dtype == send.dtype:  # else they are converted on the way
        recv, send = movable(recv), movable(send)
    stream = _after_compute(comm, comm.streams.gather) if async_op else None
    work = comm.all_gather(recv, send, stream=stream)
    _tell_autograd(output_tensor)
    return work


@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
) -> None: ...
@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = ...,
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = dist.ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduces a tensor over all ranks, and gives each rank its part; as the function of torch.distributed.

    Tensors may have any shapes and must be contiguous. They lie apart from each other, or in place as
    `Communicator.reduce_scatter` takes them. float16 and bfloat16 are summed in float32.

    Args:
        output: Where this rank's part goes: n elements.
        input: What is reduced: ranks * n elements.
        op: ReduceOp.SUM, AVG, MAX or MIN.
        group: As in `all_gather_into_tensor`.
        async_op: Whether to return at once.

    Returns:
        With `async_op` the Work to wait for, else None.

    Raises:
        TypeError: As `all_gather_into_tensor`.
        ValueError: As `all_gather_into_tensor`; or `op` is none of the accepted.
        CommError: As `all_gather_into_tensor`.

    Example:
        ```python
        grad = torch.empty(4)
        shardcomm.reduce_scatter_tensor(grad, torch.ones(comm.size * 4), torch.distributed.ReduceOp.AVG)
        ```
    """
    if not isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType) or op not in OPS:
        raise ValueError(
            f"reduce_scatter_tensor: op is {op}; accepted: ReduceOp.SUM, AVG, MAX and MIN"
        )
    recv, send = _detached("reduce_scatter_tensor", ("output", output), ("input", input))
    comm = _communicator("reduce_scatter_tensor", group, send.device)
    stream = _after_compute(comm, comm.streams.reduce) if async_op else None
    work = comm.reduce_scatter(recv, send, OPS[op], stream=stream)
    _tell_autograd(output)
    return work


def _detached(
    operation: str, output: tuple[str, torch.Tensor], input: tuple[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is written and what is read, each given with its argument's name, as tensors for the core."""
    for name, tensor in (output, input):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{operation}: {name} is a {type(tensor).__name__}; it must be a torch.Tensor"
            )
    (to, written), (of, read) = output, input
    recv, send = written.detach(), resolved(operation, of, read.detach(), written=False)
    check_movable(operation, to, recv)
    check_movable(operation, of, send)
    return recv, send


def _tell_autograd(output: torch.Tensor) -> None:
    """A backward that needs the former values of `output` raises, as after torch's functions over Gloo."""
    if not output.is_inference():
        torch.autograd.graph.increment_version(output)


def _after_compute(comm: Communicator, stream: AnyStream) -> AnyStream:
    """`stream`, which waits for what was computed so far: for the operands of an asynchronous collective."""
    comm.streams.after_compute(stream)
    return stream


def _communicator(operation: str, group: Group, device: torch.device) -> Communicator:
    """That of the group; of its ranks on the type of `device`, if it has a backend of its own for each type."""
    if isinstance(group, Communicator):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError(
                f"{operation}: there is no default group; call torch.distributed.init_process_group first, or pass a "
                "Communicator as group"
            )
        group = dist.group.WORLD
    check_member(operation, group)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{operation}: group is {group!r}; it must be a ProcessGroup of which this rank is part, or a Communicator"
        )
    kinds = backend_names(operation, group)
    is_mixed = len(set(kinds.values())) > 1
    if is_mixed and device.type not in kinds:
        raise ValueError(
            f"{operation}: input is on {device}; the group has backends for tensors on {' and '.join(kinds)}"
        )
    where = device.type if is_mixed else None
    by_device = _communicators.setdefault(group, {})
    if where not in by_device:
        by_device[where] = Communicator.from_process_group(group, device=where)
    return by_device[where]


# An entry lives as long as torch keeps the group. A communicator that a caller passes is the caller's to close.
_communicators: WeakKeyDictionary[dist.ProcessGroup, dict[str | None, Communicator]] = (
    WeakKeyDictionary()
)
