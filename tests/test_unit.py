from __future__ import annotations

import pytest
from torch import nn

from shardcomm.schedule import Phase
from shardcomm.unit import find_units, registration_order


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.head = nn.Linear(2, 2, bias=False)

    def forward(self) -> None:
        """What makes it a model, and no container."""


def names(model: nn.Module, units: object = None) -> dict[str, list[str]]:
    return {u.name: [p.name for p in u.params] for u in find_units(model, units)}  # type: ignore[arg-type]


def test_module_list_entries_are_units_and_the_root_takes_the_rest() -> None:
    assert names(Tree()) == {
        "": ["embed.weight", "head.weight"],
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "blocks.1": ["blocks.1.weight", "blocks.1.bias"],
        "blocks.2": ["blocks.2.weight", "blocks.2.bias"],
    }


def test_units_by_class_and_by_module() -> None:
    model = Tree()
    assert list(names(model, nn.Linear)) == [
        "",
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
    ]
    assert list(names(model, [model.blocks[1]])) == ["", "blocks.1"]
    assert list(names(model, [])) == [""]


def test_tied_parameter_within_a_unit_has_two_places() -> None:
    model = Tree()
    model.head.weight = model.embed.weight
    (tied,) = find_units(model, None)[0].params
    assert tied.places == [(model.embed, "weight"), (model.head, "weight")]


def test_parameter_tied_across_units_belongs_to_the_unit_around_both() -> None:
    model = Tree()
    model.blocks[2].weight = model.blocks[0].weight
    found = names(model)
    assert "blocks.0.weight" in found[""]
    assert found["blocks.2"] == ["blocks.2.bias"]


def test_nested_units_own_what_inner_units_leave() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    assert names(model, [model[0], model[0][1]]) == {
        "": ["1.weight", "1.bias"],
        "0": ["0.0.weight", "0.0.bias"],
        "0.1": ["0.1.weight", "0.1.bias"],
    }


def test_registration_order_opens_and_closes_units_like_a_forward() -> None:
    model = Tree()
    order = registration_order(find_units(model, None))
    opened, closed = Phase.PRE_FORWARD, Phase.POST_FORWARD
    assert order == (
        (opened, 0),
        *[(phase, unit) for unit in (1, 2, 3) for phase in (opened, closed)],
        (closed, 0),
    )


def test_module_of_another_model_is_refused() -> None:
    with pytest.raises(
        ValueError, match="units contains Linear, which is not a module of the model"
    ):
        find_units(Tree(), [nn.Linear(1, 1)])


def test_containers_without_a_forward_are_no_units() -> None:
    model = Tree()
    model.blocks[1] = nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(2, 2)])})
    found = names(model)
    assert list(found) == ["", "blocks.0", "blocks.1.inner.0", "blocks.2"]
    for units in (nn.ModuleList, [model.blocks[1]]):
        with pytest.raises(ValueError, match=r"units contains a Module.*, which has no forward"):
            find_units(model, units)
    with pytest.raises(
        ValueError, match="model is a ModuleList with parameters and without a forw"
    ):
        find_units(nn.ModuleList([nn.ModuleDict({"inner": nn.Linear(2, 2)})]), None)
