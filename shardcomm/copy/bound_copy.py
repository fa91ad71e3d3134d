"""BoundCopy: a copy plan and the tensors that each run of it copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import Tensor

from shardcomm.arguments.arrays import ArrayLike
from shardcomm.arguments.checks import check_flag
from shardcomm.arguments.scalars import checked_scale
from shardcomm.copy.nonfinite import flag_address
from shardcomm.copy.operands import as_tensors, device_of
from shardcomm.stream.streams import AnyStream, check_stream, compute_stream, on_host

if TYPE_CHECKING:
    from shardcomm.copy.plan import CopyPlan


class Executor(Protocol):
    """What runs a plan on given addresses of one device: the compiled core's executor, or Triton's."""

    def set_operands(self, sources: list[int], destinations: list[int]) -> None:
        """Sets the addresses that later runs read and write."""

    def run(
        self,
        scale: float = ...,
        accumulate: bool = ...,
        nonfinite: int = ...,
        stream: Any = ...,
    ) -> None:
        """Queues the copy on `stream`. Options may change from run to run; nothing is made anew for that."""


class BoundCopy:
    """A plan that is bound to its tensors, which it keeps alive. `CopyPlan.bind` makes it."""

    def __init__(
        self,
        plan: CopyPlan,
        core: Executor,
        sources: Sequence[Tensor | None],
        destinations: Sequence[Tensor],
    ) -> None:
        self.plan = plan
        self.core = core
        self.sources = sources
        self.destinations = destinations
        self.device = device_of(destinations)

    def set_sources(self, sources: Sequence[ArrayLike | None]) -> None:
        """Makes later runs read `sources`. Call it only while no run is under way. It raises as `CopyPlan.run` does."""
        read = as_tensors("sources", sources)
        self.core.set_operands(
            self.plan.source_pointers(read, self.device),
            [destination.data_ptr() for destination in self.destinations],
        )
        self.sources = read

    def run(
        self,
        *,
        scale: float = 1.0,
        accumulate: bool = False,
        nonfinite: Tensor | None = None,
        stream: AnyStream | None = None,
    ) -> None:
        """As `CopyPlan.run`, without the GIL, on `stream` or where torch computes now.

        `nonfinite`: one int32 element, which the run sets to 1 if an element that it writes is NaN or Inf, and else
        leaves as it is. Keep sources and the flag alive while a run is queued.
        """
        if type(scale) is not float or scale != 1.0:
            scale = checked_scale("BoundCopy.run", scale)
        if accumulate is not False:
            check_flag("BoundCopy.run", "accumulate", accumulate)
        if stream is not None:
            check_stream("BoundCopy.run", stream)
        flag = flag_address("BoundCopy.run", nonfinite, self.device)
        if stream is None and not on_host(self.device):
            stream = compute_stream(self.device)
        self.core.run(scale, accumulate, flag, stream)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a BoundCopy cannot be copied or pickled: it is bound to memory of this process; call the plan's bind again"
        )
