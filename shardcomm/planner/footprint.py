"""Footprint: what one rank holds for a model. The planner says it beforehand, `engine.footprint()` measures it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """Bytes one rank holds for a model between steps. Optimizer state comes on top, in the shards' shapes.

    Attributes:
        parameter_bytes: shards, padding included; with `cpu_offload` in host memory, as are the gradients.
        gradient_bytes: their gradients, padding included: of all that have been reduced, until the next forward gives
            the memory back where it can.
        slot_bytes: full-size buffers; between processes of one host all see the same ones, unless there are secondary
            shards.
        secondary_bytes: secondary shards, by `reshard_after_forward`.
        reduce_buffer_bytes: where gradients are packed to be reduced.
        staging_bytes: where they are all-reduced among replicas.
        offload_bytes: of the device, through which shards and gradients pass that are in host memory.
        padding_bytes: of all ranks' shards together; what the layout costs.
        total_parameter_bytes: the whole model's parameters. What `ranks` ranks hold is this plus the padding.
    """

    parameter_bytes: int
    gradient_bytes: int
    slot_bytes: int
    secondary_bytes: int
    reduce_buffer_bytes: int
    staging_bytes: int
    offload_bytes: int
    padding_bytes: int
    total_parameter_bytes: int
