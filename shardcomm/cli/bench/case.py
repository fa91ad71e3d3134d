"""A case: one operation on one workload, ready to be run, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from shardcomm.comm.words import ReduceOp, Use


class Collectives(Protocol):
    """The collectives of one rank over a transport: any Communicator, or torch.distributed (see `transports`)."""

    rank: int
    size: int
    device: torch.device

    def allocate(self, numel: int, *, dtype: torch.dtype, use: Use) -> torch.Tensor:
        """Allocates communication memory."""

    def all_gather(self, recv: torch.Tensor, send: torch.Tensor) -> object:
        """Gathers `send` of all ranks into `recv`."""

    def reduce_scatter(self, recv: torch.Tensor, send: torch.Tensor, op: ReduceOp) -> object:
        """Reduces `send` over all ranks, and writes this rank's part to `recv`."""

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> object:
        """Reduces `buffer` in place."""

    def broadcast(self, buffer: torch.Tensor, root: int) -> object:
        """Copies `buffer` of rank `root` to all ranks."""

    def close(self) -> None:
        """Leaves the group."""


@dataclass(frozen=True)
class Variant:
    """An operation on inputs and outputs in certain places: out of place, or in place.

    Attributes:
        fill: Writes the inputs that belong to a seed; other seeds have other inputs.
        run: Runs the operation.
        wrong: Counts the elements of the result that do not follow from the seed.
    """

    fill: Callable[[int], None]
    run: Callable[[], object]
    wrong: Callable[[int], int]


@dataclass(frozen=True)
class Case:
    """What a row of the table measures.

    Attributes:
        size_bytes: The size as printed. algbw is this size over the time.
        count: The number of elements as printed.
        bus_factor: busbw over algbw, as nccl-tests' PERFORMANCE.md defines it.
        out_of_place: The operation out of place.
        in_place: The operation in place; None if it cannot be.
    """

    size_bytes: int
    count: int
    bus_factor: float
    out_of_place: Variant
    in_place: Variant | None

    def variants(self) -> list[Variant]:
        """The variants: out of place first, as nccl-tests has it."""
        return [self.out_of_place] + ([self.in_place] if self.in_place else [])
