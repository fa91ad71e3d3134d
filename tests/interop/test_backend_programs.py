"""Random programs of torch.distributed calls, in random groups, in threads and asynchronously: every result is right.

Each rank makes the same choices, and so knows what the others send. The suite runs some programs. `make fuzz` runs
10,000 in more than 4,000 groups that come and go.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from shardcomm import launch
from support.gates import until
from support.random_collectives import DTYPES, OPS, reduced, values

RANKS = 4
THREADS = 3
GROUPS_A_THREAD = 2
PROGRAMS_A_TURN = 15  # as many threads and groups serve these
CALLS = 8  # of a program

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")

Results = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that a call writes, and what each must have in the end."""


@dataclass
class Call:
    """A collective of a random program, as one of the ranks in `group` makes it."""

    group: dist.ProcessGroup
    ranks: Sequence[int]  # of the world, in the group's order
    me: int  # in the group
    seed: int
    numel: int
    dtype: torch.dtype
    op: str
    root: int  # in the group
    later: bool  # whether the call is asynchronous

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def options(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.later}

    @property
    def reduce_op(self) -> Any:
        return getattr(dist.ReduceOp, self.op.upper())

    def sent(self, rank: int, parts: int = 1) -> torch.Tensor:
        """What this rank of the group sends: whole numbers."""
        return values(self.seed, rank, parts * self.numel, self.dtype)

    def parts(self, rank: int) -> list[torch.Tensor]:
        """The same, one for each rank."""
        return list(self.sent(rank, self.size).split(self.numel)) if self.numel else self._empty()

    def everybody(self, parts: int = 1) -> list[torch.Tensor]:
        return [self.sent(rank, parts) for rank in range(self.size)]

    def empty(self, parts: int = 1) -> torch.Tensor:
        return torch.empty(parts * self.numel, dtype=self.dtype)

    def several(self) -> list[torch.Tensor]:
        return [self.empty() for _ in range(self.size)]

    def _empty(self) -> list[torch.Tensor]:
        return [torch.empty(0, dtype=self.dtype) for _ in range(self.size)]


Begun = tuple[Any, Results]
"""The call's Work, or several, or None where it was synchronous; and the results."""


def all_gather_into_tensor(call: Call) -> Begun:
    whole = call.empty(call.size)
    work = dist.all_gather_into_tensor(whole, call.sent(call.me), **call.options)
    return work, [(whole, torch.cat(call.everybody()))]


def all_gather(call: Call) -> Begun:
    outputs = call.several()
    work = dist.all_gather(outputs, call.sent(call.me), **call.options)
    return work, list(zip(outputs, call.everybody(), strict=True))


def reduce_scatter_tensor(call: Call) -> Begun:
    part = call.empty()
    x = call.sent(call.me, call.size)
    work = dist.reduce_scatter_tensor(part, x, call.reduce_op, **call.options)
    return work, [(part, reduced([call.parts(r)[call.me] for r in range(call.size)], call.op))]


def reduce_scatter(call: Call) -> Begun:
    part = call.empty()
    work = dist.reduce_scatter(part, call.parts(call.me), call.reduce_op, **call.options)
    return work, [(part, reduced([call.parts(r)[call.me] for r in range(call.size)], call.op))]


def all_reduce(call: Call) -> Begun:
    x = call.sent(call.me)
    work = dist.all_reduce(x, call.reduce_op, **call.options)
    return work, [(x, reduced(call.everybody(), call.op))]


def several_all_reduces(call: Call) -> Begun:
    xs = call.parts(call.me)
    with _coalescing_manager(call.group, async_ops=call.later) as manager:
        for x in xs:
            dist.all_reduce(x, call.reduce_op, group=call.group)
    of_each = zip(*(call.parts(r) for r in range(call.size)), strict=True)
    expected = [reduced(list(each), call.op) for each in of_each]
    return manager if call.later else None, list(zip(xs, expected, strict=True))


def broadcast(call: Call) -> Begun:
    x = call.sent(call.me)
    work = dist.broadcast(x, call.ranks[call.root], **call.options)
    return work, [(x, call.sent(call.root))]


def reduce(call: Call) -> Begun:
    x = call.sent(call.me)
    work = dist.reduce(x, call.ranks[call.root], call.reduce_op, **call.options)
    return work, [(x, reduced(call.everybody(), call.op))] if call.me == call.root else []


def gather(call: Call) -> Begun:
    outputs = call.several() if call.me == call.root else None
    work = dist.gather(call.sent(call.me), outputs, call.ranks[call.root], **call.options)
    return work, list(zip(outputs, call.everybody(), strict=True)) if outputs else []


def scatter(call: Call) -> Begun:
    x = call.empty()
    inputs = call.parts(call.me) if call.me == call.root else None
    work = dist.scatter(x, inputs, call.ranks[call.root], **call.options)
    return work, [(x, call.parts(call.root)[call.me])]


def all_to_all_single(call: Call) -> Begun:
    x = call.empty(call.size)
    work = dist.all_to_all_single(x, call.sent(call.me, call.size), **call.options)
    return work, [(x, torch.cat([call.parts(r)[call.me] for r in range(call.size)]))]


def all_to_all_uneven(call: Call) -> Begun:
    choose = random.Random(call.seed)
    counts = [[choose.choice((0, 1, call.numel)) for _ in call.ranks] for _ in call.ranks]
    sent = [values(call.seed, r, sum(counts[r]), call.dtype) for r in range(call.size)]
    mine = [row[call.me] for row in counts]
    x = torch.empty(sum(mine), dtype=call.dtype)
    work = dist.all_to_all_single(x, sent[call.me], mine, counts[call.me], **call.options)
    ends = [list(accumulate(row)) for row in counts]
    parts = [sent[r][ends[r][call.me] - mine[r] : ends[r][call.me]] for r in range(call.size)]
    return work, [(x, torch.cat(parts))]


def all_to_all(call: Call) -> Begun:
    outputs = call.several()
    work = dist.all_to_all(outputs, call.parts(call.me), **call.options)
    expected = [call.parts(r)[call.me] for r in range(call.size)]
    return work, list(zip(outputs, expected, strict=True))


def messages(call: Call) -> Begun:
    """Around a ring, each in two pieces; which of them is received first, tags decide."""
    after, before = (call.me + 1) % call.size, (call.me - 1) % call.size
    if call.size == 1:
        return None, []
    x, outputs = call.sent(call.me), [call.empty(), call.empty()]
    works = [
        *(dist.isend(y, call.ranks[after], call.group, tag) for tag, y in enumerate((x, x + 1))),
        *(
            dist.irecv(outputs[tag], call.ranks[before], call.group, tag)
            for tag in random.Random(call.seed).sample((0, 1), 2)
        ),
    ]
    if not call.later:
        for work in works:
            work.wait()
        works = []
    x = call.sent(before)
    return works, list(zip(outputs, (x, x + 1), strict=True))


def barrier(call: Call) -> Begun:
    return dist.barrier(**call.options), []


KINDS: Sequence[Callable[[Call], Begun]] = (
    all_gather_into_tensor,
    all_gather,
    reduce_scatter_tensor,
    reduce_scatter,
    all_reduce,
    several_all_reduces,
    broadcast,
    reduce,
    gather,
    scatter,
    all_to_all_single,
    all_to_all_uneven,
    all_to_all,
    messages,
    barrier,
)


class Program:
    """Calls in `groups`, one after the other; asynchronous ones are waited for at random later places.

    Every rank makes the choices of all calls, and those that are not in a call's group then leave it out.
    """

    def __init__(self, groups: Sequence[tuple[Any, Sequence[int]]], seed: int) -> None:
        self._groups = groups
        self._seed = seed
        self._choose = random.Random(seed)
        self._begun: list[tuple[str, Begun | None]] = []

    def run(self) -> None:
        for number in range(CALLS):
            self._begin(number)
            while self._begun and self._choose.random() < 0.4:
                self._end(self._choose.randrange(len(self._begun)))
        while self._begun:
            self._end(0)

    def _begin(self, number: int) -> None:
        choose = self._choose
        kind = choose.choice(KINDS)
        group, ranks = choose.choice(self._groups)
        numel = choose.choice((0, 1, 3, 64, choose.randrange(500), choose.randrange(40_000)))
        dtype, op = choose.choice(DTYPES), choose.choice(OPS)
        root, later = choose.randrange(len(ranks)), choose.random() < 0.5
        begun = None
        what = f"{kind.__name__} #{number} of program {self._seed}: {numel} {dtype}, {op}, {ranks}"
        if dist.get_rank() in ranks:
            me, seed = ranks.index(dist.get_rank()), self._seed * CALLS + number
            try:
                begun = kind(Call(group, ranks, me, seed, numel, dtype, op, root, later))
            except Exception as error:
                raise AssertionError(what) from error
        self._begun.append((what, begun))
        if not later:
            self._end(-1)

    def _end(self, index: int) -> None:
        what, begun = self._begun.pop(index)
        if begun is None:
            return
        work, results = begun
        for each in work if isinstance(work, list) else [work]:
            if each is not None:
                each.wait()
        for got, expected in results:
            assert torch.equal(got, expected), f"{what}: {got} is not {expected}"


def turn(number: int, seed: int, programs: int, backend: str) -> None:
    """Makes groups, runs programs in threads, each with groups of its own, and destroys the groups."""
    choose = random.Random(seed + number)
    of_threads = []
    for _ in range(THREADS):
        chosen = [
            sorted(choose.sample(range(RANKS), choose.randint(1, RANKS)))
            for _ in range(GROUPS_A_THREAD)
        ]
        of_threads.append(
            [(dist.new_group(ranks, timedelta(seconds=60), backend), ranks) for ranks in chosen]
        )
    wrong: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            for each in range(programs // THREADS):
                Program(of_threads[thread], hash((seed, number, thread, each)) % (1 << 40)).run()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    for groups in of_threads:
        for group, ranks in groups:
            if dist.get_rank() in ranks:
                dist.destroy_process_group(group)


def left() -> list[int]:
    """How many threads, files and mappings this process has."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("shardcomm")
    return [*(len(os.listdir(f"/proc/self/{each}")) for each in ("task", "fd")), maps]


def programs(seed: int, count: int, backend: str = "shardcomm") -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    before = [0, 0, 0]
    for number in range(-(-count // PROGRAMS_A_TURN)):
        turn(number, seed, PROGRAMS_A_TURN, backend)
        dist.barrier()
        if number < 3:  # torch keeps some
            before = list(map(max, before, left()))
    until(lambda: all(a <= b for a, b in zip(left(), before, strict=True)), f"at most {before}")
    dist.destroy_process_group()


@pytest.mark.covers("torch.distributed backend")
def test_random_programs_give_what_first_principles_say(seed: int, program_count: int) -> None:
    launch(programs, RANKS, (seed, program_count), timeout_s=60 + program_count)
