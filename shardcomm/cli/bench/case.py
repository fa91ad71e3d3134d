"""A case: one operation on one workload, ready to be run, as every rank has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from shardcomm.comm.communicator import ReduceOp, Use


class Collectives(Protocol):
    """One rank's end of a transport: any Communicator, and torch.distributed (see `transports`)."""

    rank: int
    size: int
    device: torch.device

    def allocate(self, numel: int, *, dtype: torch.dtype, use: Use) -> torch.Tensor:
        """Communication memory."""

    def all_gather(self, recv: torch.Tensor, send: torch.Tensor) -> object:
        """`send` of all ranks to `recv`."""

    def reduce_scatter(self, recv: torch.Tensor, send: torch.Tensor, op: ReduceOp) -> object:
        """This rank's part of `send`, reduced, to `recv`."""

    def all_reduce(self, buffer: torch.Tensor, op: ReduceOp) -> object:
        """Reduces `buffer` in place."""

    def broadcast(self, buffer: torch.Tensor, root: int) -> object:
        """`buffer` of `root` to all."""

    def close(self) -> None:
        """Leaves the group."""


@dataclass(frozen=True)
class Variant:
    """Where inputs and outputs lie.

    Attributes:
        fill: writes the inputs that belong to a seed, different ones for different seeds.
        run: the operation.
        wrong: how many elements of the result are not those that follow from the seed.
    """

    fill: Callable[[int], None]
    run: Callable[[], object]
    wrong: Callable[[int], int]


@dataclass(frozen=True)
class Case:
    """What a row of the table measures.

    Attributes:
        size_bytes: as printed; algbw is this over the time.
        count: elements, as printed.
        bus_factor: busbw over algbw, as nccl-tests' PERFORMANCE.md defines it.
        in_place: None for an operation that cannot.
    """

    size_bytes: int
    count: int
    bus_factor: float
    out_of_place: Variant
    in_place: Variant | None

    def placements(self) -> list[Variant]:
        """Out of place first, as nccl-tests has it."""
        return [self.out_of_place] + ([self.in_place] if self.in_place else [])
