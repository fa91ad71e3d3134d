"""How long a unit computes: by its floating-point operations, or as a trace has it."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from torch import nn

from shardcomm.arguments.checks import check_flag, check_type
from shardcomm.arguments.scalars import is_whole
from shardcomm.simulate.machine import Machine
from shardcomm.trace.timeline import COMMUNICATION, Span, Timeline
from shardcomm.unit.unit import OwnedParam, UnitParams, Units, find_units

_FORWARD, _BACKWARD = "forward ", "backward "
_MOST = (1 << 60) - 1  # tokens, and operations of a token


class UnitTime(NamedTuple):
    """The seconds that a unit computes in a step, without the units that it contains, on a rank that nothing slows.

    Attributes:
        forward_s: In its forward.
        backward_s: In its backward, recomputation included.
    """

    forward_s: float
    backward_s: float


def times_by_flops(
    model: nn.Module,
    machine: Machine,
    *,
    tokens: int,
    units: Units = None,
    attention: int = 0,
    recompute: bool = False,
) -> tuple[UnitTime, ...]:
    """Estimates each unit's compute time: its operations over `machine.flops_per_s`, plus `machine.unit_s`.

    A token takes two operations for each element of a matrix, except where a matrix is only looked up in
    (`nn.Embedding`). A backward takes `machine.backward` forwards, and one more where it recomputes the forward. A
    frozen matrix has no gradient, whose product is left out. Nor does backward come to units in front of all trained
    parameters, in the order of registration.

    Args:
        model: The model, on any device.
        machine: The machine.
        tokens: The tokens of a step on a rank: batch x context.
        units: As in `fully_shard`.
        attention: The operations that a token takes in the attention of each unit inside the model, beside its
            matrices: for causal attention, 2 x context x width.
        recompute: Whether the units inside the model recompute their forward in backward (activation checkpointing).

    Returns:
        The times in seconds, one for each unit, in the order of the plan's units.

    Raises:
        TypeError: `model` or `machine` is not of its type, or `units` is none of the types that `fully_shard` accepts.
        ValueError: `tokens` or `attention` is no whole number of its range, `recompute` is not True or False, or
            `units` names something that is no unit of the model; see `fully_shard`.
    """
    check_type("times_by_flops", "model", model, nn.Module, "a torch.nn.Module")
    check_type("times_by_flops", "machine", machine, Machine, "a shardcomm.Machine")
    for name, value, least in (("tokens", tokens, 1), ("attention", attention, 0)):
        if not is_whole(value, least, _MOST):
            raise ValueError(
                f"times_by_flops: {name} is {value!r}; it must be a whole number from {least}, below 2**60"
            )
    check_flag("times_by_flops", "recompute", recompute)
    found = find_units(model, units)
    reached = _after_the_first_trained(model)
    times = []
    for index, (unit, flops) in enumerate(
        zip(found, _flops_of(found, tokens, attention), strict=True)
    ):
        forward_s = flops / machine.flops_per_s + machine.unit_s
        backward_s = 0.0
        if not reached.isdisjoint(unit.module.modules()):
            forwards = machine.backward + (1 if recompute and index > 0 else 0)
            frozen = _multiplied(each for each in unit.params if not each.param.requires_grad)
            backward_s = forwards * forward_s - 2 * tokens * frozen / machine.flops_per_s
        times.append(UnitTime(forward_s, backward_s))
    return tuple(times)


def unit_flops(
    model: nn.Module, *, tokens: int, units: Units = None, attention: int = 0
) -> list[int]:
    """The operations of each unit's forward; the arguments are those of `times_by_flops`."""
    return _flops_of(find_units(model, units), tokens, attention)


def _flops_of(units: Sequence[UnitParams], tokens: int, attention: int) -> list[int]:
    inside = [0, *[attention] * (len(units) - 1)]
    return [
        tokens * (2 * _multiplied(unit.params) + of_attention)
        for unit, of_attention in zip(units, inside, strict=True)
    ]


def _multiplied(params: Iterable[OwnedParam]) -> int:
    """How many elements the matrices have by which a token is multiplied."""
    return sum(
        owned.param.numel()
        for owned in params
        if owned.param.dim() > 1
        and not all(isinstance(module, nn.Embedding) for module, _ in owned.places)
    )


def _after_the_first_trained(model: nn.Module) -> set[nn.Module]:
    """The modules from the first with a trained parameter of its own on, in the order of registration."""
    frozen = takewhile(
        lambda module: not any(p.requires_grad for p in module.parameters(recurse=False)),
        model.modules(),
    )
    return set(model.modules()).difference(frozen)


def times_of_trace(timeline: Timeline, names: Sequence[str]) -> tuple[UnitTime, ...]:
    """The time of each unit in a trace of one rank: the median over its steps.

    Take the trace on a rank alone, since the computation of several ranks contains waits for each other. A unit that
    contains others is taken to compute before the first of them and after the last.

    Args:
        timeline: The trace, with steps.
        names: The names of the units, in order.

    Returns:
        The times in seconds, in the order of `names`.

    Raises:
        ValueError: The trace has no steps, or is of several ranks, or of a model with other units; or a step has
            several forwards of a unit whose backwards it does not show.
    """
    spans = timeline.ranks[0].spans
    if len(timeline.ranks) > 1 or any(s.nbytes for s in spans if s.row in COMMUNICATION):
        raise ValueError(
            "the trace is of several ranks, which communicate; take it of one, as `shardcomm train --ranks 1 "
            "--trace FILE` does"
        )
    # Those that are around others come before them.
    computed = sorted(
        (span for span in spans if span.row == "compute"),
        key=lambda span: (span.begin_s, -span.end_s),
    )
    begins = [span.begin_s for span in computed]
    reduces = [span for span in spans if span.row == "reduce"]
    steps = [span for span in spans if span.row == "step"]
    if not steps:
        raise ValueError("the trace has no steps; mark them by `with trace.step(number):`")
    found: dict[str, list[float]] = defaultdict(list)
    of_steps = [
        computed[bisect_left(begins, step.begin_s) : bisect_left(begins, step.end_s)]
        for step in steps
    ]
    # The stream of reduces may come to a step's last ones in the forward of the next.
    from_s = [(within or [step])[0].end_s for step, within in zip(steps, of_steps, strict=True)]
    to_s = [*from_s[1:], math.inf]
    for step, within, first_s, last_s in zip(steps, of_steps, from_s, to_s, strict=True):
        _check_one_backward(step, within)
        reduced = [span for span in reduces if first_s < span.begin_s <= last_s]
        for name, seconds in _with_unannounced(within, reduced, step.end_s).items():
            found[name].append(seconds)
    traced = {name.removeprefix(_FORWARD) for name in found if name.startswith(_FORWARD)}
    if traced != set(names):
        differing = sorted(traced ^ set(names))
        raise ValueError(
            f"the trace is of another model: it has {len(traced)} units and the model {len(names)}, "
            f"and only one of them has {differing[0]!r}"
        )
    return tuple(
        UnitTime(
            statistics.median(found[_FORWARD + name]),
            statistics.median(found.get(_BACKWARD + name, [0.0])),
        )
        for name in names
    )


def _own_times(computed: Sequence[Span]) -> dict[str, float]:
    """For each forward and backward its seconds, without those from the first unit inside of it to the last.

    Spans are apart or one inside the other, as calls are. Those that are around others come before them.
    """
    first_begin_s: dict[int, float] = {}  # by position: of the first that is inside of this one
    last_end_s: dict[int, float] = {}
    around: list[int] = []  # the span before, behind those that are around it
    for position, span in enumerate(computed):
        while around and computed[around[-1]].end_s < span.end_s:
            around.pop()
        if around:
            first_begin_s.setdefault(around[-1], span.begin_s)
            last_end_s[around[-1]] = span.end_s
        around.append(position)
    times: dict[str, float] = defaultdict(float)
    for position, span in enumerate(computed):
        before_s = first_begin_s.get(position, span.end_s) - span.begin_s
        times[span.name] += before_s + (span.end_s - last_end_s.get(position, span.end_s))
    return times


def _check_one_backward(step: Span, computed: Sequence[Span]) -> None:
    """ValueError if the step has several forwards of a unit, and no backward of it."""
    times = Counter(span.name for span in computed)
    for name, forwards in times.items():
        unit = name.removeprefix(_FORWARD)
        if forwards > 1 and unit != name and _BACKWARD + unit not in times:
            raise ValueError(
                f"the trace has {forwards} forwards of {unit!r} in {step.name!r}, and no span of their backwards; take "
                "it of steps of one forward and one backward"
            )


def _with_unannounced(
    computed: Sequence[Span], reduced: Sequence[Span], end_s: float
) -> dict[str, float]:
    """The own times of a step, and backwards of which it has no span, as far as the rest tells how long they were.

    The gradient of a unit's input announces the end of its backward, and the input of a model has none. Where a
    backward is not announced, its time is in two parts, one up to the first backward inside of it and one up to its
    reduce. Each begins where other computation ended last, or another such unit's reduce began. A frozen unit without a
    backward inside of it has neither part, and computes nothing.

    Args:
        computed: The step's computation.
        reduced: Its reduces. Their stream may come to the last ones after the step.
        end_s: When the step ended.
    """
    times = _own_times(computed)
    reduced_s = {span.name: span.begin_s for span in reduced if _BACKWARD + span.name not in times}
    marks = sorted([*(span.end_s for span in computed), *reduced_s.values()])
    added = dict(times)
    for forward in computed:
        unit = forward.name.removeprefix(_FORWARD)
        if unit == forward.name or _BACKWARD + unit in times:
            continue
        inside = {
            _BACKWARD + span.name.removeprefix(_FORWARD)
            for span in computed
            if forward.begin_s <= span.begin_s and span.end_s <= forward.end_s
        }
        first_s = next((span.begin_s for span in computed if span.name in inside), None)
        added[_BACKWARD + unit] = sum(
            min(moment, end_s) - min(marks[bisect_left(marks, moment) - 1], end_s)
            for moment in (first_s, reduced_s.get(unit))
            if moment is not None and moment > marks[0]
        )
    return added
