from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardcomm import Policy
from shardcomm.schedule.triggers import Phase
from shardcomm.unit.unit import find_units, registration_order


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
        "(root)": ["embed.weight", "head.weight"],
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "blocks.1": ["blocks.1.weight", "blocks.1.bias"],
        "blocks.2": ["blocks.2.weight", "blocks.2.bias"],
    }


def test_units_by_class_and_by_module() -> None:
    model = Tree()
    assert list(names(model, nn.Linear)) == [
        "(root)",
        "embed",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "head",
    ]
    assert list(names(model, [model.blocks[1]])) == ["(root)", "blocks.1"]
    assert list(names(model, [])) == ["(root)"]


def test_tied_parameter_within_a_unit_has_two_places() -> None:
    model = Tree()
    model.head.weight = model.embed.weight
    (tied,) = find_units(model, None)[0].params
    assert tied.places == [(model.embed, "weight"), (model.head, "weight")]


def test_parameter_tied_across_units_belongs_to_the_unit_around_both() -> None:
    model = Tree()
    model.blocks[2].weight = model.blocks[0].weight
    found = names(model)
    assert "blocks.0.weight" in found["(root)"]
    assert found["blocks.2"] == ["blocks.2.bias"]


def test_nested_units_own_what_inner_units_leave() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Linear(1, 1))
    assert names(model, [model[0], model[0][1]]) == {
        "(root)": ["1.weight", "1.bias"],
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


def test_lists_inside_an_entry_of_a_list_belong_to_it() -> None:
    """Experts, or a block's layers; given by their class they are units all the same."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

        def forward(self) -> None:
            """What makes it a unit."""

    model = Tree()
    model.blocks = nn.ModuleList([Block(), Block()])
    experts = [f"blocks.{i}.experts.{j}" for i in range(2) for j in range(2)]
    assert names(model) == {
        "(root)": ["embed.weight", "head.weight"],
        "blocks.0": [f"{name}.weight" for name in experts[:2]],
        "blocks.1": [f"{name}.weight" for name in experts[2:]],
    }
    by_class = names(model, [Block, nn.Linear])
    assert list(by_class) == [
        "(root)",
        "embed",
        "blocks.0",
        *experts[:2],
        "blocks.1",
        *experts[2:],
        "head",
    ]


def test_ignored_parameters_belong_to_no_unit() -> None:
    model = Tree()
    ignored = [model.head.weight, *model.blocks[1].parameters()]
    found = {u.name: [p.name for p in u.params] for u in find_units(model, None, ignored)}
    assert found == {
        "(root)": ["embed.weight"],
        "blocks.0": ["blocks.0.weight", "blocks.0.bias"],
        "blocks.1": [],
        "blocks.2": ["blocks.2.weight", "blocks.2.bias"],
    }


@pytest.mark.parametrize(
    ("ignored", "says"),
    [
        (lambda model: model.head.weight, "ignored_params is a Parameter; it must be parameters"),
        (lambda model: 3, "ignored_params is a int"),
        (lambda model: ["head.weight"], "contains 'head.weight', which is not a parameter of"),
        (lambda model: [nn.Linear(3, 2).weight], r"contains \(2, 3\), which is not a parameter of"),
    ],
)
def test_what_is_no_parameter_of_the_model_is_not_ignored(ignored: Any, says: str) -> None:
    model = Tree()
    with pytest.raises((TypeError, ValueError), match=says):
        find_units(model, None, ignored(model))


def test_policies_go_to_modules_of_a_class_and_first_to_those_that_are_named() -> None:
    model = Tree()
    of_class, of_one = Policy(prefetch=2), Policy(cpu_offload=True)
    units = {nn.Linear: of_class, model.blocks[1]: of_one, model: Policy(prefetch=0), nn.ReLU: None}
    with pytest.raises(
        ValueError, match="the class ReLU, of which the model has no module; accepted: Linear, "
    ):
        find_units(model, units)
    del units[nn.ReLU]
    found = {unit.name: unit.policy for unit in find_units(model, units)}
    assert found.pop("blocks.1") == of_one
    assert found.pop("(root)") == Policy(prefetch=0)
    assert set(found.values()) == {of_class}
    with pytest.raises(
        TypeError, match=r"units maps Linear to 'no_shard'; it must be a shardcomm\.Po"
    ):
        find_units(model, {nn.Linear: "no_shard"})  # type: ignore[dict-item]


def test_a_policy_leaves_open_what_is_none() -> None:
    rest = Policy(prefetch=1, backward_prefetch=3, cpu_offload=True)
    assert Policy(prefetch=0, cpu_offload=False).over(rest) == Policy(
        prefetch=0, backward_prefetch=3, cpu_offload=False
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
    assert list(found) == ["(root)", "blocks.0", "blocks.1.inner.0", "blocks.2"]
    for units in (nn.ModuleList, [model.blocks[1]]):
        with pytest.raises(ValueError, match=r"units contains a Module.*, which has no forward"):
            find_units(model, units)
    with pytest.raises(
        ValueError, match="model is a ModuleList with parameters and without a forw"
    ):
        find_units(nn.ModuleList([nn.ModuleDict({"inner": nn.Linear(2, 2)})]), None)
