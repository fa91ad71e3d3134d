"""Recorders of graphs (torch.compile, torch.jit.trace, make_fx), which would keep what a forward gathers."""

from __future__ import annotations

import torch
from torch._C import _is_tracing as is_tracing
from torch.compiler import is_dynamo_compiling

from shardcomm.sharded import now
from shardcomm.sharded.sharded_unit import ShardedUnit


def check_not_in_a_graph(unit: ShardedUnit) -> None:
    """Ends a graph of torch.compile here; RuntimeError inside of torch.jit.trace."""
    if is_dynamo_compiling():
        # Dynamo ends its graph here; under fullgraph=True it raises this message.
        torch._dynamo.graph_break(
            msg="fully_shard gathers a unit's parameters between graphs; compile blocks by "
            "block.compile(fullgraph=True) before fully_shard, or leave fullgraph=True out"
        )
    if is_tracing():
        raise _keeps_constants("torch.jit.trace", unit)


def check_not_recorded(unit: ShardedUnit) -> None:
    """RuntimeError inside of make_fx, or of what builds on it."""
    if now.in_make_fx():
        raise _keeps_constants("make_fx", unit)


def _keeps_constants(recorder: str, unit: ShardedUnit) -> RuntimeError:
    return RuntimeError(
        f"{recorder} of unit {unit.name!r} would keep as constants parameters that are gathered for this call alone; "
        "trace inside of engine.gathered()"
    )
