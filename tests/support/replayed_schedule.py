"""A schedule, checked by carrying it out: `Replay` runs a step's actions, trigger by trigger."""

from collections import Counter

from shardcomm.schedule.planning import REDUCES_IN_FLIGHT
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.triggers import END, Phase, Trigger


def pre(unit):
    return Trigger(Phase.PRE_FORWARD, unit)


def post(unit):
    return Trigger(Phase.POST_FORWARD, unit)


def pre_backward(unit):
    return Trigger(Phase.PRE_BACKWARD, unit)


def post_backward(unit):
    return Trigger(Phase.POST_BACKWARD, unit)


def call(unit, *inner):
    """The triggers of one call of `unit`, with the calls `inner` inside it."""
    return (pre(unit), *(trigger for each in inner for trigger in each), post(unit))


def step_of(order, backward=True):
    """A step's triggers, from first principles: the backward undoes the forward call by call."""
    opposite = {Phase.PRE_FORWARD: Phase.POST_BACKWARD, Phase.POST_FORWARD: Phase.PRE_BACKWARD}
    mirrored = [Trigger(opposite[phase], unit) for phase, unit in reversed(order)]
    return [*order, *mirrored, END] if backward else list(order)


class Replay:
    """Carries out a step's actions, and fails where they would use or overwrite the wrong thing."""

    def __init__(self, schedule, order, *, sharded=True, replicate=False, backward=True):
        self.schedule = schedule
        self.sharded = sharded
        self.replicate = replicate
        self.to_all_reduce = set()
        self.step = step_of(order, backward)
        self.slots = {}  # slot -> unit in it, arrived or on its way
        self.arrived = set()
        self.open = Counter()  # units in use
        self.unfinished = []
        self.reduced = []
        self.gathers = []  # (position, unit)
        self.to_come = Counter(self.step)  # how often each trigger will still fire
        for position, trigger in enumerate(self.step):
            self.fire(position, trigger)

    def fire(self, position, trigger):
        self.position, self.trigger = position, trigger
        phase, unit = trigger
        self.to_come[self.trigger] -= 1
        if phase in (Phase.POST_FORWARD, Phase.POST_BACKWARD):
            self.check_usable(unit)  # nobody took it while it was in use
            self.open[unit] -= 1
        for action in self.schedule.actions[self.trigger]:
            getattr(self, action.verb.value)(action.unit, action.slot)
        if phase in (Phase.PRE_FORWARD, Phase.PRE_BACKWARD):
            self.check_usable(unit)
            self.open[unit] += 1
        for in_use in +self.open:
            self.check_usable(in_use)

    def check_usable(self, unit):
        if self.sharded:
            assert unit in self.arrived, f"{self.trigger}: unit {unit} is in use but not there"
            assert self.slots[self.schedule.slot_of[unit]] == unit

    def next_user(self, slot):
        starts = (Phase.PRE_FORWARD, Phase.PRE_BACKWARD)
        users = (unit for phase, unit in self.step[self.position :] if phase in starts)
        return next((unit for unit in users if self.schedule.slot_of[unit] == slot), None)

    def gather(self, unit, slot):
        assert self.sharded
        assert slot == self.schedule.slot_of[unit]
        if self.slots.get(slot) == unit:
            return
        assert slot not in self.slots, f"{self.trigger}: gather {unit} overwrites {self.slots}"
        assert self.next_user(slot) == unit, f"{self.trigger}: gather {unit} is in another's way"
        self.slots[slot] = unit
        self.gathers.append((self.position, unit))

    def wait_gather(self, unit, slot):
        assert self.slots.get(slot) == unit, f"{self.trigger}: nothing to wait for"
        self.arrived.add(unit)

    def release(self, unit, slot):
        assert self.sharded
        assert not self.open[unit], f"{self.trigger}: releases unit {unit} while in use"
        if self.slots.get(slot) == unit:
            assert unit in self.arrived, f"{self.trigger}: releases unit {unit} on its way"
            del self.slots[slot]
            self.arrived.remove(unit)

    def reduce(self, unit, slot):
        assert slot == -1
        assert unit not in self.reduced
        assert self.to_come[post_backward(unit)] == 0, f"{self.trigger}: gradient incomplete"
        self.reduced.append(unit)
        self.unfinished.append(unit)
        self.to_all_reduce |= {unit} if self.replicate else set()
        assert len(self.unfinished) <= REDUCES_IN_FLIGHT

    def all_reduce(self, unit, slot):
        assert slot == -1
        self.to_all_reduce.remove(unit)

    def wait_reduce(self, unit, slot):
        assert slot == -1
        assert unit not in self.to_all_reduce
        self.unfinished.remove(unit)


def replay(order, arguments, schedule=None):
    return Replay(
        schedule or Schedule.plan(order, **arguments),
        order,
        sharded=arguments["strategy"] != "no_shard",
        replicate=arguments["strategy"] in ("no_shard", "hybrid_shard"),
        backward=arguments["backward"],
    )
