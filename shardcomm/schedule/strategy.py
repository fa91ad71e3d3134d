"""Strategies: what a rank keeps between uses, and which ranks share the rest. Each strategy is a row of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Strategy:
    """One way to lay a model over ranks.

    Attributes:
        name: The name that `fully_shard` and `Schedule.plan` take.
        shard_params: Whether full parameters exist only between their gather and their release.
        reshard_after_forward: Whether units share slots, so that most are released after their forward and gathered
            again for their backward. Otherwise each unit has its own slot and stays in between.
        replicate: Whether several ranks hold the same shard (or the whole model), and all-reduce its gradient.
    """

    name: str
    shard_params: bool
    reshard_after_forward: bool
    replicate: bool

    @property
    def hybrid(self) -> bool:
        """Whether the ranks are in two dimensions: one shards, and one replicates."""
        return self.shard_params and self.replicate

    def scheduled(self, *, cpu_offload: bool) -> Strategy:
        """The strategy by which a step is scheduled: parameters in host memory are gathered, even on one rank.

        Args:
            cpu_offload: Whether the shard is in host memory.

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
        """The strategy of this name; a Strategy is returned as it is.

        Args:
            name: A name in [`STRATEGIES`][shardcomm.STRATEGIES], or a Strategy.

        Returns:
            The strategy.

        Raises:
            ValueError: There is no strategy of this name.
        """
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
"""The strategies by name: "full_shard" (ZeRO-3), "shard_grad_op" (ZeRO-2), "hybrid_shard" (ZeRO-3 in groups of ranks
that are data parallel to each other) and "no_shard" (data parallel)."""
