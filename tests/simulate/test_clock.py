"""The clock, by hand: what is computed, what travels meanwhile, and who is slowed by whom."""

from __future__ import annotations

from collections.abc import Sequence

from shardcomm.simulate.clock import Collective, Compute, Issue, Wait, run
from shardcomm.simulate.cost import LATENCY, TURN, Cost, Move
from shardcomm.trace.timeline import Span


def free(computing: bool, links: Sequence[str]) -> tuple[float, list[float]]:
    """Nothing is in anything's way."""
    return 1.0, [1.0] * len(links)


def shared(computing: bool, links: Sequence[str]) -> tuple[float, list[float]]:
    """One core for everything."""
    share = 1 / max(1, computing + len(links))
    return share, [share] * len(links)


def collective(
    channel: str, name: str, latency_s: float, moving_s: float, after: Collective | None = None
) -> Collective:
    stages = (Move(LATENCY, latency_s),), (Move("host", moving_s, 8),)
    return Collective(channel, name, Cost(stages, 8), after)


def test_a_collective_goes_on_beside_computation() -> None:
    one = collective("gather", "1", 0.5, 2.0)
    assert run([Issue(one), Compute("forward 0", 3.0), Wait(one)], free) == [
        Span("gather", "1", 0.0, 2.5, 8),
        Span("compute", "forward 0", 0.0, 3.0, 0),
    ]


def test_what_is_left_of_it_is_waited_for() -> None:
    one = collective("gather", "1", 0.5, 2.0)
    assert run([Issue(one), Compute("forward 0", 1.0), Wait(one)], free)[-1] == Span(
        "waiting", "gather 1", 1.0, 2.5, 0
    )


def test_collectives_of_a_channel_queue_and_those_of_two_do_not() -> None:
    first, second = collective("gather", "1", 0.0, 1.0), collective("gather", "2", 0.0, 1.0)
    beside = collective("reduce", "3", 0.0, 1.5)
    spans = run([Issue(first), Issue(second), Issue(beside)], free)
    assert {(span.name, span.begin_s, span.end_s) for span in spans} == {
        ("1", 0.0, 1.0),
        ("2", 1.0, 2.0),
        ("3", 0.0, 1.5),
    }


def test_a_collective_begins_after_the_one_that_it_needs() -> None:
    reduce = collective("reduce", "1", 0.0, 2.0)
    all_reduce = collective("all_reduce", "1", 0.25, 1.0, after=reduce)
    assert run([Issue(reduce), Issue(all_reduce), Wait(all_reduce)], free)[1] == Span(
        "all_reduce", "1", 2.0, 3.25, 8
    )


def test_computation_and_copies_share_a_core() -> None:
    """Until 2 s both go on at half speed; then the computation is alone, with one of its two seconds left."""
    one = collective("gather", "1", 0.0, 1.0)
    spans = run([Issue(one), Compute("forward 0", 2.0)], shared)
    assert [(span.row, span.end_s) for span in spans] == [("gather", 2.0), ("compute", 3.0)]


def test_a_latency_takes_nothing_from_computation() -> None:
    one = collective("gather", "1", 1.0, 1.0)
    spans = run([Issue(one), Compute("forward 0", 1.5)], shared)
    assert [(span.row, span.end_s) for span in spans] == [("compute", 2.0), ("gather", 2.5)]


def test_turns_pass_while_the_rank_computes() -> None:
    """They take nothing from it: only the move after them halves its speed, for its last half a second."""
    one = Collective("gather", "1", Cost(((Move(TURN, 1.0),), (Move("host", 0.25),)), 8))
    spans = run([Issue(one), Compute("forward 0", 2.0), Wait(one)], shared)
    assert [(span.row, span.end_s) for span in spans] == [("gather", 1.5), ("compute", 2.25)]


def test_turns_are_over_at_once_when_the_rank_waits() -> None:
    stages = (Move(TURN, 8.0),), (Move("host", 1.0),), (Move(TURN, 8.0),)
    first, second = (Collective("gather", name, Cost(stages, 8)) for name in ("1", "2"))
    program = [Issue(first), Issue(second), Compute("forward 0", 3.0), Wait(first), Wait(second)]
    assert [(span.row, span.begin_s, span.end_s) for span in run(program, free)] == [
        ("compute", 0.0, 3.0),
        ("gather", 0.0, 4.0),
        ("waiting", 3.0, 4.0),
        ("gather", 4.0, 5.0),
        ("waiting", 4.0, 5.0),
    ]


def test_a_wait_for_what_has_ended_takes_no_time() -> None:
    one = collective("gather", "1", 0.0, 1.0)
    assert [span.row for span in run([Issue(one), Compute("a", 1.0), Wait(one)], free)] == [
        "gather",
        "compute",
    ]


def test_a_stage_ends_with_the_last_of_its_moves() -> None:
    first = Move("memory", 0.5)
    for network_s, core_s in ((2.0, 1.0), (1.0, 2.0)):
        stages = (first,), (Move("network", network_s), Move("memory", core_s))
        one = Collective("gather", "1", Cost(stages, 8))
        assert run([Issue(one)], free) == [Span("gather", "1", 0.0, 2.5, 8)]


def test_a_link_that_had_a_pause_does_its_burst_at_once() -> None:
    """It begins with a second saved up. In the pause of half a second before the third it saves half a second more."""
    each = [
        Collective("gather", str(i), Cost(((Move("network", seconds),),), 8))
        for i, seconds in enumerate((1.5, 1.0, 2.0))
    ]
    first, second, third = each
    program = [
        *(Issue(first), Issue(second), Wait(second), Compute("forward 0", 0.5), Issue(third)),
    ]
    spans = run(program, free, burst_s=1.0)
    ends = {span.name: (span.begin_s, span.end_s) for span in spans if span.row == "gather"}
    assert ends == {"0": (0.0, 0.5), "1": (0.5, 1.5), "2": (2.0, 3.5)}


def test_only_what_is_at_work_is_in_the_way_of_others() -> None:
    """The core's second of the collective takes two, beside the network's; then computation is alone."""
    cores = []

    def one_core(computing: bool, links: Sequence[str]) -> tuple[float, list[float]]:
        cores.append(computing + links.count("memory"))
        share = 1 / max(1, cores[-1])
        return share, [share if link == "memory" else 1.0 for link in links]

    one = Collective("gather", "1", Cost(((Move("network", 4.0), Move("memory", 1.0)),), 8))
    spans = run([Issue(one), Compute("forward 0", 2.0)], one_core)
    assert [(span.row, span.end_s) for span in spans] == [("compute", 3.0), ("gather", 4.0)]
    assert cores == [2, 1, 0]
