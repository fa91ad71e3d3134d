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
    """How a unit is sharded; what is None is as `fully_shard`'s argument of the same name.

    Norms that compute in float32 among blocks in bfloat16, and an embedding in host memory::

        half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        in_float32 = MixedPrecision(param_dtype=torch.float32, output_dtype=torch.bfloat16)
        fully_shard(model, comm, mixed_precision=half, units={
            Block: None,
            nn.LayerNorm: Policy(mixed_precision=in_float32),
            model.embed: Policy(cpu_offload=True, prefetch=0),
        })

    Experts, of which ranks 0 and 2 hold one half and ranks 1 and 3 the other::

        same = Communicator.from_process_group(group_of_the_ranks_with_my_experts)
        fully_shard(model, comm, units={Block: None, Experts: Policy(comm=same)})

    Attributes:
        comm: the ranks among which this unit, and units inside of it, are sharded, all of which hold the same
            parameters; `fully_shard`'s other ranks hold other parameters here, under other names if a checkpoint is to
            have them all. Gradients are summed over these ranks, and divided by the number of all, since the losses of
            all may have led to them.
        strategy: how it is laid over these ranks.
        reshard_after_forward: the ranks of this one's host, or how many they are; see `fully_shard`. What all units
            have in common is not for a unit with a `comm` or `strategy` of its own.
        mixed_precision: dtypes of this unit; its `output_dtype` is that of the unit's own outputs.
        prefetch, backward_prefetch: how many units are gathered ahead while this one computes.
        cpu_offload: whether its shard, gradients and optimizer state are in host memory.
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
                f"fully_shard: mixed_precision is {self.mixed_precision!r}; it must be a shardcomm.MixedPrecision"
            )
        host = self.reshard_after_forward
        if isinstance(host, bool):
            name = "full_shard" if host else "shard_grad_op"
            raise TypeError(
                f"fully_shard: reshard_after_forward is {host}, which is strategy={name!r} here; give that, or the "
                "Communicator of the ranks that are to gather for backward among themselves"
            )
        if not isinstance(host, Communicator | int | None):
            raise TypeError(
                f"fully_shard: reshard_after_forward is a {type(host).__name__}; it must be a shardcomm.Communicator, "
                "for instance Communicator.from_process_group(group_of_my_host), or with a DeviceMesh a number of ranks"
            )

    def facts(self) -> dict[str, str]:
        """What ranks must agree on, by its name."""
        facts = {f.name: repr(getattr(self, f.name)) for f in fields(self) if f.name != "comm"}
        return facts | {"reshard_after_forward": repr(self._given_ranks)}

    @property
    def ranks(self) -> tuple[object, str | None, object]:
        """Units in which it is equal are on the same ranks, laid out alike."""
        return self.comm, self.strategy, self.reshard_after_forward

    @property
    def _given_ranks(self) -> int | None:
        host = self.reshard_after_forward
        return host.size if isinstance(host, Communicator) else host

    def secondary_ranks(self, ranks: int) -> int:
        """Of `ranks` ranks that hold a unit between them, how many gather it for backward; 0: all.

        Raises:
            ValueError: so many cannot, or need not; or full parameters are kept for backward.
        """
        given = self._given_ranks
        if given is None:
            return 0
        what = f"fully_shard: reshard_after_forward is a group of {given}"
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
        """This one, with what it leaves open taken from `rest`."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.comm is not None or self.strategy not in (None, rest.strategy):
            rest = replace(rest, reshard_after_forward=None)
        return replace(rest, **{name: value for name, value in given.items() if value is not None})
