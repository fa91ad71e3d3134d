"""Policy: how units are sharded, and how one of them differs from the rest."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torch.distributed.device_mesh import DeviceMesh

from shardcomm.communicator import Communicator
from shardcomm.mesh import Mesh
from shardcomm.mixed_precision import MixedPrecision


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

    def __post_init__(self) -> None:
        if not isinstance(self.mixed_precision, MixedPrecision | None):
            raise TypeError(
                f"fully_shard: mixed_precision is {self.mixed_precision!r}; it must be a shardcomm.MixedPrecision"
            )

    def facts(self) -> dict[str, str]:
        """What ranks must agree on, by its name."""
        return {f.name: repr(getattr(self, f.name)) for f in fields(self) if f.name != "comm"}

    def over(self, rest: Policy) -> Policy:
        """This one, with what it leaves open taken from `rest`."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(rest, **{name: value for name, value in given.items() if value is not None})
