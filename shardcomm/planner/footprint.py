"""Footprint: what one rank holds for a model. The planner says it beforehand, and `engine.footprint()` measures it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """The bytes that one rank holds for a model between steps. Optimizer state comes on top, in the shards' shapes.

    Attributes:
        parameter_bytes: The shards, padding included; with `cpu_offload` in host memory, as are the gradients.
        gradient_bytes: The gradients of the shards, padding included, of all units that have been reduced. The next
            forward gives the memory back where it can.
        slot_bytes: The full-size buffers. Processes of one host share them, unless there are secondary shards.
        secondary_bytes: The secondary shards, which `reshard_after_forward` makes.
        wire_bytes: The buffers of gathers in a block format. Processes of one host share what is received.
        reduce_buffer_bytes: The buffers in which gradients are packed to be reduced.
        staging_bytes: The buffers in which they are all-reduced among replicas.
        offload_bytes: The device's memory through which shards and gradients pass that are in host memory.
        padding_bytes: The padding of all ranks' shards together, which is the price of the layout.
        total_parameter_bytes: The whole model's parameters. All ranks together hold these and the padding.
    """

    parameter_bytes: int
    gradient_bytes: int
    slot_bytes: int
    secondary_bytes: int
    wire_bytes: int
    reduce_buffer_bytes: int
    staging_bytes: int
    offload_bytes: int
    padding_bytes: int
    total_parameter_bytes: int
