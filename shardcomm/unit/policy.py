"""Policy: how units are sharded, and how one of them differs from the rest."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torch.distributed.device_mesh import DeviceMesh

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import Mesh
from shardcomm.schedule.strategy import Strategy
from shardcomm.unit.mixed_precision import MixedPrecision


@dataclass(frozen=True)
class Policy:
    """How one unit is sharded, where it differs from the rest. None means: as `fully_shard`'s argument of that name.

    Attributes:
        comm: The ranks among which this unit, and units inside of it, are sharded: all ranks that have the unit's
            parameters. `fully_shard`'s other ranks have other parameters in this unit's place, and a checkpoint has
            those of all ranks only if their names differ. Gradients are summed over the ranks of `comm`, and divided
            by the number of all ranks, since the losses of all may have led to them.
        strategy: How the unit is laid over these ranks: a name in [`STRATEGIES`][shardcomm.STRATEGIES].
        mixed_precision: The dtypes of this unit. Its `output_dtype` is that of the unit's own outputs.
        prefetch: How many units are gathered ahead while this one computes, in forward.
        backward_prefetch: The same in backward.
        cpu_offload: Whether the unit's shard, gradients and optimizer state are in host memory.
        reshard_after_forward: The ranks that gather the unit for backward, or their number; see `fully_shard`. A unit
            with a `comm` or `strategy` of its own does not take over `fully_shard`'s.

    Raises:
        TypeError: `mixed_precision` is no MixedPrecision, or `reshard_after_forward` is neither a Communicator nor a
            whole number.

    Example:
        Norms compute in float32 among blocks in bfloat16, and an embedding is in host memory:

        ```py
        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        in_float32 = MixedPrecision(param_dtype=torch.float32, output_dtype=torch.bfloat16)
        fully_shard(model, comm, mixed_precision=half, units={
            Block: None,
            nn.LayerNorm: Policy(mixed_precision=in_float32),
            model.embed: Policy(cpu_offload=True, prefetch=0),
        })
        ```

        Ranks 0 and 2 hold one half of the experts, and ranks 1 and 3 the other half:

        ```py
        same = Communicator.from_process_group(group_of_the_ranks_with_my_experts)
        fully_shard(model, comm, units={Block: None, Experts: Policy(comm=same)})
        ```
    """

    comm: Communicator | DeviceMesh | Mesh | None = None
    strategy: str | None = None
    mixed_precision: MixedPrecision | None = None
    prefetch: int | None = None
    backward_prefetch: int | None = None
    cpu_offload: bool | None = None
    reshard_after_forward: Communicator | int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mixed_precision, MixedPrecision | None):
            raise TypeError(
                f"mixed_precision is {self.mixed_precision!r}; it must be a shardcomm.MixedPrecision, such as "
                "MixedPrecision(param_dtype=torch.bfloat16)"
            )
        host = self.reshard_after_forward
        if isinstance(host, bool):
            name = "full_shard" if host else "shard_grad_op"
            raise TypeError(
                f"reshard_after_forward is {host}, which is strategy={name!r} here; give that, or the "
                "Communicator of the ranks that are to gather for backward among themselves"
            )
        if not isinstance(host, Communicator | int | None):
            raise TypeError(
                f"reshard_after_forward is a {type(host).__name__}; it must be a shardcomm.Communicator, "
                "for instance Communicator.from_process_group(group_of_my_host), or with a DeviceMesh a number of ranks"
            )

    def facts(self) -> dict[str, str]:
        """The values in which all ranks must agree, by name."""
        facts = {f.name: repr(getattr(self, f.name)) for f in fields(self) if f.name != "comm"}
        return facts | {"reshard_after_forward": repr(self._given_ranks)}

    @property
    def ranks(self) -> tuple[object, object, object]:
        """A key: two units with equal keys are on the same ranks, and laid over them alike."""
        how = None if self.strategy is None else Strategy.named(self.strategy)
        laid = how and (how.shard_params, how.replicate)
        return self.comm, laid, self.reshard_after_forward

    @property
    def _given_ranks(self) -> int | None:
        host = self.reshard_after_forward
        return host.size if isinstance(host, Communicator) else host

    def secondary_ranks(self, ranks: int) -> int:
        """How many of the `ranks` ranks that hold a unit between them gather it for backward; 0: all of them.

        Raises:
            ValueError: This number of ranks cannot gather for backward, or has no need to; or the strategy keeps full
                parameters for backward.
        """
        given = self._given_ranks
        if given is None:
            return 0
        what = f"reshard_after_forward is a group of {given}"
        if not Strategy.named(self.strategy or "").reshard_after_forward:
            raise ValueError(
                f"{what} and strategy is {self.strategy!r}, which keeps full parameters for backward; leave it out, or "
                "take 'full_shard' or 'hybrid_shard'"
            )
        if given == 1:
            raise ValueError(f"{what}; full parameters stay with strategy='shard_grad_op'")
        if given == ranks:
            raise ValueError(f"{what}, which are all; leave it out")
        if not 1 < given < ranks or ranks % given:
            raise ValueError(
                f"{what}; it must be of a number that divides the {ranks} ranks that hold a model between them"
            )
        return given

    def over(self, rest: Policy) -> Policy:
        """This policy, with the fields that it leaves open taken from `rest`."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.comm is not None or self.strategy not in (None, rest.strategy):
            rest = replace(rest, reshard_after_forward=None)
        return replace(rest, **{name: value for name, value in given.items() if value is not None})
