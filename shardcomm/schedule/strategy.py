"""Strategies: what a rank keeps between uses, and whom it shares the rest with. A row of a table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Strategy:
    """One way to lay a model over ranks.

    ``shard_params``: full parameters exist only between their gather and their release.
    ``reshard_after_forward``: units share slots, so most are released after their forward and
    gathered again for their backward; otherwise each has its own slot and stays in between.
    ``replicate``: several ranks hold the same shard (or model), and all-reduce its gradient.
    """

    name: str
    shard_params: bool
    reshard_after_forward: bool
    replicate: bool

    @property
    def hybrid(self) -> bool:
        """Whether its ranks are in two dimensions."""
        return self.shard_params and self.replicate

    def scheduled(self, *, cpu_offload: bool) -> Strategy:
        """As steps are scheduled: what is in host memory is gathered from there, even where no rank shares it.

        Raises:
            TypeError: `cpu_offload` is no bool.
        """
        if not isinstance(cpu_offload, bool):  # objects that say "off" are true as well
            raise TypeError(
                f"cpu_offload is {cpu_offload!r}; it must be True, as FSDP2's CPUOffloadPolicy() is, or False"
            )
        return replace(self, shard_params=self.shard_params or cpu_offload)

    @staticmethod
    def named(name: Strategy | str) -> Strategy:
        """The strategy of this name, or itself; ValueError for any other."""
        if isinstance(name, Strategy):
            return name
        if not isinstance(name, str) or name not in STRATEGIES:
            raise ValueError(f"strategy is {name!r}; accepted: {', '.join(map(repr, STRATEGIES))}")
        return STRATEGIES[name]


STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        # ZeRO-3, ZeRO-2, ZeRO-3 in groups that are data parallel to each other, data parallel
        Strategy("full_shard", shard_params=True, reshard_after_forward=True, replicate=False),
        Strategy("shard_grad_op", shard_params=True, reshard_after_forward=False, replicate=False),
        Strategy("hybrid_shard", shard_params=True, reshard_after_forward=True, replicate=True),
        Strategy("no_shard", shard_params=False, reshard_after_forward=False, replicate=True),
    )
}
