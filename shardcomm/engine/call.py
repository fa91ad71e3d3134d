"""A call of `fully_shard`, as all ranks make it together: they compare it, and one that fails tells the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from torch import nn

from shardcomm._C import CommError
from shardcomm.comm.agreement import Item, difference, layout_items
from shardcomm.comm.mesh import FailingTogether, Mesh
from shardcomm.meeting.comm_error import comm_error
from shardcomm.unit.grouped_unit import GroupedUnit

_ERROR = "error"


class Call:
    """This rank's call of `fully_shard`.

    Attributes:
        facts: In what the calls of all ranks must agree, by name.
        together: The context of the call's collectives.
    """

    def __init__(self, main: Mesh, facts: Mapping[str, str]) -> None:
        self._main = main
        sizes = repr((main.replicate.size, main.shard.size))
        self.facts = {_ERROR: repr(None), **facts, "(replicas, shards)": sizes}
        self.together: FailingTogether = main.failing_together

    def agree(self, mesh: Mesh, items: Iterable[Item] = ()) -> None:
        """Compares the calls and `items` of the ranks of `mesh`; collective.

        Raises:
            CommError: They differ; on all of these ranks, so that the groups stay usable.
        """
        if differs := self._difference(mesh, items):
            raise comm_error("mismatch", f"fully_shard: ranks differ: {differs}")

    @contextmanager
    def told_to_all(self) -> Iterator[None]:
        """Tells all ranks of an exception in this context, which may concern this rank's model alone.

        The other ranks hear of it when they come to compare their calls, instead of waiting for this one.
        """
        try:
            yield
        except Exception as error:
            self.facts[_ERROR] = repr(error)
            with suppress(CommError):
                self._difference(self._main)
            raise

    @contextmanager
    def ended_by_errors(self, meshes: Iterable[Mesh]) -> Iterator[None]:
        """Ends the groups of `meshes` if this rank raises, since the other ranks wait in collectives of the call."""
        try:
            with self.together:
                yield
        except CommError:
            raise
        except Exception as error:
            for mesh in meshes:
                mesh.abort(f"its fully_shard raised {error!r}")
            raise

    def _difference(self, mesh: Mesh, items: Iterable[Item] = ()) -> str:
        with self.together:
            return difference((mesh.shard, mesh.replicate), [Item("the call", self.facts), *items])


def items_of(model: nn.Module, units: Sequence[GroupedUnit]) -> Iterator[Item]:
    """The facts in which all ranks' models must agree, since their collectives rely on them; unit by unit."""
    names = {module: name for name, module in model.named_modules()}
    for grouped in units:
        yield Item(f"unit {grouped.unit.name!r}", grouped.policy.facts())
        for owned in grouped.unit.params:
            places = [f"{names[module]}.{attribute}" for module, attribute in owned.places]
            facts = {} if owned.distribution is None else owned.distribution.facts
            yield Item(f"parameter {owned.name!r}", {"places": repr(places), **facts})
        for group in grouped.groups:
            shared = {
                "dtype": str(group.dtype),
                "requires_grad": str(group.trainable),
                "param_dtype": str(group.param_dtype),
                "reduce_dtype": str(group.reduce_dtype),
                "gather_format": str(group.gather_format),
                "coded": str(group.coded),
                "reduce_format": str(group.reduce_format),
            }
            yield from layout_items(group.layout, shared)
