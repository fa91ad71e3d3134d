"""What a step is made of: the triggers that a model's hooks fire, and the actions that a schedule lists for them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """The kinds of points in a step at which triggers fire."""

    __hash__ = object.__hash__  # Enum's own is slower Python code; a step looks up many triggers

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    END_OF_BACKWARD = "end_of_backward"


class Trigger(NamedTuple):
    """A point of a step that a hook reports.

    Attributes:
        phase: The kind of point.
        unit: The unit; -1 for END_OF_BACKWARD.
    """

    phase: Phase
    unit: int

    def __str__(self) -> str:
        return self.phase.value if self.unit < 0 else f"{self.phase.value}({self.unit})"


END = Trigger(Phase.END_OF_BACKWARD, -1)


class Verb(Enum):
    """What an action does to its unit. To issue a gather or reduce, and to wait for it, are separate actions."""

    GATHER = "gather"
    WAIT_GATHER = "wait_gather"
    RELEASE = "release"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    WAIT_REDUCE = "wait_reduce"


class Action(NamedTuple):
    """Something that is done to a unit at a trigger.

    Attributes:
        verb: What is done.
        unit: The unit.
        slot: The slot of the unit's full parameters; -1 where the verb does not concern them.
    """

    verb: Verb
    unit: int
    slot: int

    def __str__(self) -> str:
        return f"{self.verb.value} {self.unit}"
