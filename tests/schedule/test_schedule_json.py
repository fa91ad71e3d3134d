"""Schedules as text: what the C library reads of them is what Python planned."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest

import shardcomm
from shardcomm import Schedule
from shardcomm.schedule.triggers import Phase, Trigger, Verb


class _Action(ctypes.Structure):
    """shc_action of shardcomm.h."""

    _fields_ = (("verb", ctypes.c_int), ("unit", ctypes.c_int), ("slot", ctypes.c_int))


def nested(units: int) -> list[Trigger]:
    """Unit 0 around the others, each called once."""
    inner = [
        Trigger(phase, unit)
        for unit in range(1, units)
        for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)
    ]
    return [Trigger(Phase.PRE_FORWARD, 0), *inner, Trigger(Phase.POST_FORWARD, 0)]


def in_c(text: str, schedule: Schedule) -> dict[Trigger, list[tuple[Verb, int, int]]]:
    """The actions that libshardcomm reads from `text`, for each trigger of `schedule`."""
    library = ctypes.CDLL(str(Path(shardcomm.get_library_dir()) / "libshardcomm.so.0"))
    library.shc_last_error_text.restype = ctypes.c_char_p
    handle = ctypes.c_void_p()
    assert library.shc_schedule_parse(text.encode(), ctypes.byref(handle)) == 0, (
        library.shc_last_error_text()
    )
    read = {}
    for trigger in schedule.triggers():
        first, count = ctypes.POINTER(_Action)(), ctypes.c_size_t()
        status = library.shc_schedule_actions(
            handle,
            list(Phase).index(trigger.phase),
            trigger.unit,
            ctypes.byref(first),
            ctypes.byref(count),
        )
        assert status == 0, library.shc_last_error_text()
        read[trigger] = [
            (list(Verb)[action.verb], action.unit, action.slot) for action in first[: count.value]
        ]
    library.shc_schedule_destroy(handle)
    return read


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"])
def test_c_reads_the_actions_that_python_planned(strategy: str) -> None:
    schedule = Schedule.plan(nested(5), strategy, prefetch=2)
    read = in_c(schedule.to_json(), schedule)
    assert read == {
        trigger: [tuple(action) for action in schedule.actions[trigger]]
        for trigger in schedule.triggers()
    }


def test_a_unit_that_is_called_twice_has_its_triggers_once() -> None:
    twice = [
        Trigger(phase, unit)
        for unit in (0, 1, 0)
        for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)
    ]
    schedule = Schedule.plan(twice)
    triggers = [
        (entry["phase"], entry["unit"]) for entry in json.loads(schedule.to_json())["triggers"]
    ]
    assert len(set(triggers)) == len(triggers)
    assert in_c(schedule.to_json(), schedule).keys() == set(schedule.triggers())
