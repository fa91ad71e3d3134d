"""What `help()` and docs/api say of the public names: each has a text, its arguments and what it returns."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import shardcomm

ROOT = Path(__file__).parents[2]
PUBLIC = {name: getattr(shardcomm, name) for name in shardcomm.__all__}
CLASSES = [name for name, value in PUBLIC.items() if inspect.isclass(value)]
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "References")
MADE_BY_US = {"BoundCollective", "Engine", "ShardedParameter", "Work"}
"""Classes whose constructors are not for users."""
REFUSED = {"ShardedParameter.register_hook", "ShardedParameter.set_"}
"""Methods of torch's that only raise."""


def hidden() -> set[str]:
    """The methods that docs/api leaves out, because only other rooms call them."""
    found = set()
    for page in (ROOT / "docs/api").glob("*.md"):
        for block in page.read_text().split("::: shardcomm.")[1:]:
            name = block.split("\n")[0]
            found |= {f"{name}.{each}" for each in re.findall(r'"!\^(\w+)\$"', block)}
    return found


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, value in PUBLIC.items():
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for own, member in vars(value).items():
                function = getattr(member, "__func__", member)  # of a classmethod or staticmethod
                if inspect.isfunction(function) and not own.startswith("_"):
                    yield f"{name}.{own}", function


CALLABLES = {
    name: function for name, function in methods() if name not in hidden() and name not in REFUSED
}


def sections(text: str | None) -> dict[str, str]:
    """The sections of a docstring by their titles; the text before the first is ""."""
    parts = re.split(
        rf"^({'|'.join(SECTIONS)}):$", inspect.cleandoc(text or ""), flags=re.MULTILINE
    )
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def named_in(section: str) -> set[str]:
    return set(re.findall(r"^    \*{0,2}(\w+):", section, re.MULTILINE))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_a_text_of_its_own(name: str) -> None:
    """A class of the compiled core has none unless the binding gives it one; an exception inherits a useless one."""
    assert vars(PUBLIC[name]).get("__doc__"), f"help(shardcomm.{name}) says nothing of its own"


@pytest.mark.parametrize("name", ["CommError", "CudaError", "Event", "Stream"])
def test_the_texts_of_a_class_of_the_core_begin_as_in_the_reference(name: str) -> None:
    """The reference is made from the stub."""
    stub = ast.parse((ROOT / "shardcomm/_C.pyi").read_text())
    [declared] = [each for each in stub.body if getattr(each, "name", None) == name]
    assert isinstance(declared, ast.ClassDef)
    members = [each for each in declared.body if isinstance(each, ast.FunctionDef)]
    own = [(PUBLIC[name], declared), *((getattr(PUBLIC[name], m.name), m) for m in members)]
    for value, node in own:
        text = ast.get_docstring(node)
        assert text, f"the stub says nothing of {node.name}"
        assert text.splitlines()[0] in (value.__doc__ or ""), f"help() of {name}.{node.name}"


@pytest.mark.parametrize("name", sorted(set(CLASSES) - MADE_BY_US))
def test_a_constructors_arguments_are_told(name: str) -> None:
    public = PUBLIC[name]
    if public.__module__ == "shardcomm._C" or issubclass(public, (Exception, Enum)):
        return
    own = vars(public).get("__init__")
    texts = [sections(public.__doc__), sections(own.__doc__ if own else None)]
    told = {
        argument
        for text in texts
        for section in ("Args", "Attributes")
        for argument in named_in(text.get(section, ""))
    }
    assert set(inspect.signature(public).parameters) - told == set()


@pytest.mark.parametrize("name", sorted(CALLABLES))
def test_a_function_tells_its_arguments_and_what_it_returns(name: str) -> None:
    function = CALLABLES[name]
    told = sections(function.__doc__)
    assert told[""], f"{name} has no docstring"
    signature = inspect.signature(function)
    arguments = set(signature.parameters) - {"self", "cls"}
    assert arguments - named_in(told.get("Args", "")) == set()
    nothing = signature.return_annotation in ("None", "NoReturn", "Iterator[None]")
    one_sentence = set(told) == {""} and len(told[""].splitlines()) == 1  # which says what it is
    assert nothing or one_sentence or told.keys() & {"Returns", "Yields"}
