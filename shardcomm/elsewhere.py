"""What other ranks hold of a model of which each rank has some of the experts, by the names in its state dict.

    rank 0   gate.weight   experts.0.weight   experts.1.weight                                           head.weight
    rank 1   gate.weight                                         experts.2.weight   experts.3.weight     head.weight

To rank 0 experts 2 and 3 are elsewhere. Had rank 1 called its own 0 and 1, these names would be ambiguous: a dict, or
a checkpoint, has one value under each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from shardcomm.communicator import Communicator
from shardcomm.mesh import Mesh
from shardcomm.texts import all_gather_text
from shardcomm.unit import UnitParams


@dataclass(frozen=True)
class Elsewhere:
    """Of a model over `mesh`, as one rank sees it.

    Attributes:
        names: of what other ranks' state dicts have, and this one's has not.
        ambiguous: names by which other ranks call other parameters than this one.
        differs: whether ranks have other parameters at all.
    """

    mesh: Mesh
    names: frozenset[str] = frozenset()
    ambiguous: tuple[str, ...] = ()
    differs: bool = False

    @staticmethod
    def of(
        model: nn.Module, units: Sequence[UnitParams], meshes: Sequence[Mesh], main: Mesh
    ) -> Elsewhere:
        """Of `model`, whose units are over `meshes`, each of some of the ranks of `main`; collective."""
        if all(mesh.size == main.size for mesh in meshes):
            # Every rank has the same meshes, or it would have been told so.
            return Elsewhere(main)
        first: dict[Mesh, int] = {}
        for mesh in dict.fromkeys(meshes):
            rank = torch.tensor([main.rank], dtype=torch.int32, device=main.device)
            mesh.all_reduce(rank, "min")
            first[mesh] = int(rank)
        holder = {
            p.name: first[mesh]
            for unit, mesh in zip(units, meshes, strict=True)
            for p in unit.params
        }
        mine = {name: holder.get(name) for name in [*model.state_dict(keep_vars=True), *holder]}
        everybody = [json.loads(text) for text in all_gather_text(_groups(main), json.dumps(mine))]
        return Elsewhere(
            main,
            frozenset().union(*everybody) - mine.keys(),
            tuple(n for n in holder if len({each.get(n, holder[n]) for each in everybody}) > 1),
            differs=True,
        )

    def check(self, what: str) -> None:
        """RuntimeError if `what`, such as a state dict, would have one value for several parameters."""
        if self.ambiguous:
            raise RuntimeError(
                f"{what}: {self.ambiguous[0]!r} and {len(self.ambiguous) - 1} others are other parameters on other "
                "ranks, by the comm of a policy, of which it would have one under each name; give them names of their "
                "own, for instance by an nn.ModuleDict of experts with their numbers in the model. The full ones of "
                "this rank are model.named_parameters() inside of engine.gathered()"
            )

    def survey(self, state: Mapping[str, object]) -> Survey:
        """Of all ranks' state dicts, of which `state` is this one's, with whole shapes; collective where ranks differ.

        Raises:
            RuntimeError: what only some ranks have is no tensor.
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
            partly[name] = Entry(ranks[0], *everybody[ranks[0]][name])
            if not partly[name].dtype:
                raise RuntimeError(
                    f"full_state_dict: {name!r} is of a module that only some ranks have, and is no tensor; give extra "
                    "state as a tensor, or save by torch.distributed.checkpoint"
                )
        return Survey(order, partly)

    def on_all(self, names: Sequence[str]) -> list[str]:
        """The `names` of all ranks, such as those of a group of parameters; collective where ranks differ."""
        if not self.differs:
            return list(names)
        texts = all_gather_text(_groups(self.mesh), json.dumps(names))
        return _merged([json.loads(text) for text in texts])


class Entry(NamedTuple):
    """What some ranks have in their state dicts, of which `root` is the first; `dtype`: empty if it is no tensor."""

    root: int
    shape: list[int]
    dtype: str


class Survey(NamedTuple):
    """The same on every rank: all names of the model, and of which of them some ranks have nothing."""

    order: list[str]
    partly: dict[str, Entry]

    def sends(self, name: str, rank: int) -> bool:
        """Whether `rank` gives the others their value of `name`."""
        return name in self.partly and self.partly[name].root == rank

    def completed(self, state: Mapping[str, Any], mesh: Mesh, *, wanted: bool) -> dict[str, Any]:
        """`state`, where it is `wanted`, with what others have of the model; collective. Else {}.

        It has what this rank sends in any case.
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


def _described(value: object) -> tuple[list[int], str]:
    if not isinstance(value, torch.Tensor):
        return [], ""
    return list(value.shape), str(value.dtype).removeprefix("torch.")


def _groups(mesh: Mesh) -> list[Communicator]:
    """Those of `mesh` that have other ranks."""
    return [comm for comm in (mesh.shard, mesh.replicate) if comm.size > 1]


def _merged(orders: Sequence[Iterable[str]]) -> list[str]:
    """All the names of `orders`, each list's in its own order where they do not contradict each other."""
    found: list[str] = []
    for names in orders:
        known = set(found)
        before: dict[str, list[str]] = {}
        new: list[str] = []
        for name in names:
            if name in known:
                before[name], new = new, []
            else:
                new.append(name)
        found = [each for name in found for each in (*before.get(name, ()), name)] + new
    return found
