"""What other ranks hold of a model of which each rank has some of the experts, by the names in its state dict.

    rank 0   gate.weight   experts.0.weight   experts.1.weight                                           head.weight
    rank 1   gate.weight                                         experts.2.weight   experts.3.weight     head.weight

For rank 0, experts 2 and 3 are elsewhere. If rank 1 called its own experts 0 and 1, these names would be ambiguous:
under each name a dict, or a checkpoint, has one value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardcomm.comm.communicator import Communicator
from shardcomm.comm.mesh import Mesh, Ranks
from shardcomm.comm.texts import all_gather_text
from shardcomm.unit.unit import UnitParams


@dataclass(frozen=True)
class Elsewhere:
    """What other ranks hold of a model over `mesh`, as one rank sees it.

    Attributes:
        mesh: The ranks.
        names: The names in other ranks' state dicts that this rank's state dict has not.
        ambiguous: The names by which ranks call different parameters, which need not be this rank's.
        within: The expert meshes: groups of DTensors' meshes that lie within these ranks, which hold other parts.
        differs: Whether ranks have other parameters at all.
    """

    mesh: Mesh
    names: frozenset[str] = frozenset()
    ambiguous: tuple[str, ...] = ()
    within: frozenset[Ranks] = frozenset()
    differs: bool = False

    @staticmethod
    def of(
        model: nn.Module,
        units: Sequence[UnitParams],
        meshes: Sequence[Mesh],
        main: Mesh,
        inner: Iterable[Ranks],
    ) -> Elsewhere:
        """Finds what other ranks hold; collective.

        Args:
            model: The model.
            units: Its units.
            meshes: The mesh of each unit, which has some of the ranks of `main`.
            main: The mesh of all ranks.
            inner: The groups of the meshes of the model's DTensors.

        Raises:
            ValueError: Ranks have the same part of a DTensor over an expert mesh, and no common comm; or the DTensor's
                mesh has some of the ranks of `main`, and others.
        """
        if all(mesh.size == main.size for mesh in meshes):
            # Every rank has the same meshes: the ranks have compared them before.
            return Elsewhere(main)
        first: dict[Mesh, int] = {}
        for mesh in dict.fromkeys(meshes):
            rank = torch.tensor([main.rank], dtype=torch.int32, device=main.device)
            mesh.all_reduce(rank, "min")
            first[mesh] = int(rank)
        held = {
            p.name: (first[mesh], [] if p.distribution is None else p.distribution.place)
            for unit, mesh in zip(units, meshes, strict=True)
            for p in unit.params
        }
        here = [*model.state_dict(keep_vars=True), *held]
        mine = {
            "rank": dist.get_rank() if dist.is_initialized() else main.rank,
            "inner": [*inner],
            "held": held,
            "names": here,
        }
        everybody = [json.loads(text) for text in all_gather_text(_groups(main), json.dumps(mine))]
        within = _within({rank["rank"] for rank in everybody}, everybody)
        names = frozenset().union(*(rank["names"] for rank in everybody))
        return Elsewhere(
            main,
            names.difference(here),
            tuple(_ambiguous(everybody, within)),
            within,
            differs=True,
        )

    @property
    def ambiguity(self) -> str:
        """What is said of `ambiguous`, of which there are some."""
        first, *others = self.ambiguous
        names = f"{first!r} and {len(others)} more mean" if others else f"{first!r} means"
        return f"{names} different parameters on different ranks"

    def check(self, what: str) -> None:
        """Checks that `what`, such as "state_dict", can have a value for each parameter; alike on every rank.

        Raises:
            RuntimeError: Several parameters have one name.
        """
        if self.ambiguous:
            raise RuntimeError(
                f"{what}: {self.ambiguity}, since a policy has its own comm, and it can have one value under each "
                "name; give each parameter a name of its own, for instance by an nn.ModuleDict of experts with their "
                "numbers in the model. This rank's full parameters are model.named_parameters() inside of "
                "engine.gathered()"
            )

    def survey(self, state: Mapping[str, object]) -> Survey:
        """Compares all ranks' state dicts; collective where ranks differ.

        Args:
            state: This rank's state dict, with the shapes of whole parameters.

        Raises:
            RuntimeError: An entry that only some ranks have is no tensor.
        """
        if not self.differs:
            return Survey(list(state), {})
        mine = json.dumps({name: _described(value) for name, value in state.items()})
        everybody = [json.loads(text) for text in all_gather_text(_groups(self.mesh), mine)]
        order, partly = _merged(everybody), {}
        for name in order:
            ranks = [rank for rank, names in enumerate(everybody) if name in names]
            if len(ranks) == self.mesh.size:
                continue
            partly[name] = PartlyHeld(ranks[0], *everybody[ranks[0]][name])
            if not partly[name].dtype:
                raise RuntimeError(
                    f"full_state_dict: {name!r} is of a module that only some ranks have, and is no tensor; give extra "
                    "state as a tensor, or save by torch.distributed.checkpoint"
                )
        return Survey(order, partly)

    def on_all(self, groups: Sequence[Sequence[str]]) -> list[list[str]]:
        """The names of all ranks' parameters in each of an optimizer's `groups`; collective where ranks differ.

        Raises:
            ValueError: Ranks have other numbers of groups.
        """
        if not self.differs:
            return [list(names) for names in groups]
        texts = all_gather_text(_groups(self.mesh), json.dumps(groups))
        everybody = [json.loads(text) for text in texts]
        if len({len(of_rank) for of_rank in everybody}) > 1:
            raise ValueError(
                f"optimizer_state: ranks have {[len(of_rank) for of_rank in everybody]} groups of parameters; give "
                "each rank's optimizer the same groups, of its own experts"
            )
        return [_merged(names) for names in zip(*everybody, strict=True)]


class PartlyHeld(NamedTuple):
    """An entry that only some ranks have in their state dicts.

    Attributes:
        root: The first of these ranks.
        shape: The shape of the whole parameter.
        dtype: Its dtype; "" if the entry is no tensor.
    """

    root: int
    shape: list[int]
    dtype: str


class Survey(NamedTuple):
    """What the ranks' state dicts have together; the same on every rank.

    Attributes:
        order: All names of the model, in order.
        partly: The entries that only some ranks have.
    """

    order: list[str]
    partly: dict[str, PartlyHeld]

    def sends(self, name: str, rank: int) -> bool:
        """Whether `rank` sends its value of `name` to the others."""
        return name in self.partly and self.partly[name].root == rank

    def completed(self, state: Mapping[str, Any], mesh: Mesh, *, wanted: bool) -> dict[str, Any]:
        """Completes a state dict with the entries of other ranks; collective.

        Args:
            state: This rank's entries. Those that it sends must be there, even if the result is not wanted.
            mesh: The ranks.
            wanted: Whether this rank wants the result.

        Returns:
            The complete state dict; {} where it is not wanted.
        """
        whole = dict(state)
        for name, entry in self.partly.items():
            value = whole.get(name)
            if value is None:
                value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            value = value.to(mesh.device)
            mesh.broadcast(value, root=entry.root)
            if wanted:
                whole[name] = value.cpu()
        return {name: whole[name] for name in self.order} if wanted else {}


def _within(mesh: set[int], everybody: Sequence[Any]) -> frozenset[Ranks]:
    """The groups of all ranks' DTensors that lie within the ranks of `mesh`."""
    found: set[Ranks] = set()
    for each in everybody:
        for group in map(tuple, each["inner"]):
            shared = len(mesh.intersection(group))
            if shared == len(group):
                found.add(group)
            elif shared > 1:
                raise ValueError(
                    f"parameters are DTensors over ranks {list(group)}, of which fully_shard's comm has "
                    f"{shared}; accepted: all of them, as experts in a unit with Policy(comm=), or one, as tensor-"
                    "parallel ranks"
                )
    return frozenset(found)


def _ambiguous(everybody: Sequence[Any], within: frozenset[Ranks]) -> list[str]:
    """The names by which ranks call different parameters. The result, and an error, is the same on every rank."""
    names = dict.fromkeys(name for each in everybody for name in each["held"])
    return [name for name in names if _is_ambiguous(name, everybody, within)]


def _is_ambiguous(name: str, everybody: Sequence[Any], within: frozenset[Ranks]) -> bool:
    """Whether ranks hold different parameters by `name`, and not the parts of one."""
    firsts: dict[tuple[int, ...], tuple[int, int]] = {}
    other = False
    for rank, each in enumerate(everybody):
        if name not in each["held"]:
            continue
        first, place = each["held"][name]
        parts = tuple(part for group, part in place if tuple(group) in within)
        of, known = firsts.setdefault(parts, (rank, first))
        if first == known:
            continue
        if parts:
            raise ValueError(
                f"parameter {name!r} is a DTensor of which ranks {of} and {rank} have the same part, and "
                "the comm of its unit's policy does not have both; give Policy(comm=) all ranks with the same part, "
                "and no replicated parameters"
            )
        other = True
    return other


def _described(value: object) -> tuple[list[int], str]:
    if not isinstance(value, torch.Tensor):
        return [], ""
    return list(value.shape), str(value.dtype).removeprefix("torch.")


def _groups(mesh: Mesh) -> list[Communicator]:
    """The groups of `mesh` that have more ranks than this one."""
    return [comm for comm in (mesh.shard, mesh.replicate) if comm.size > 1]


def _merged(orders: Sequence[Iterable[str]]) -> list[str]:
    """All names of `orders`, in an order that keeps each list's own, where the lists do not contradict each other."""
    # For each name the name before it, in a ring that None closes. It takes linear time, for thousands of ranks.
    before: dict[str | None, str | None] = {None: None}
    for names in orders:
        new: list[str | None] = []
        for name in (*names, None):
            if name not in before:
                new.append(name)
                continue
            for each in new:  # they go right before `name`, in their order
                before[each], before[name] = before[name], each
            new.clear()
    merged = []
    last = before[None]
    while last is not None:
        merged.append(last)
        last = before[last]
    return merged[::-1]
