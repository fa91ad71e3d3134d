"""Sentences about calls name the unit that is gathered or reduced, on every rank, also for who looks on."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from shardcomm import CommError, Communicator, Mesh, Pending, fully_shard, launch
from shardcomm.cli.ps import groups
from shardcomm.comm.words import FIRST_NAMED_TAG
from support.gates import Gate, launched, until, wait_at
from support.thread_ranks import run_mesh, run_threads

DEADLINE_S = 60.0
GATHER = r"all_gather\(f32, count \d+\) of unit "


class Experts(nn.Module):
    """Sends all that it gets to one of its experts, which are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        out: torch.Tensor = self.experts[expert](self.embed(x))
        return out


def failure(comm: Communicator, *, uneven: bool) -> str:
    """What a rank hears whose experts are not the others', or that generates another number of tokens."""
    model = Experts()
    # Without prefetch: it is the unit that computes which is gathered.
    fully_shard(model, comm, units=list(model.experts), prefetch=0)

    @torch.no_grad()
    def differently() -> None:
        for _ in range(2 + comm.rank if uneven else 1):
            model(torch.ones(1, 4), 0 if uneven else comm.rank)
        comm.barrier()  # of who is done first

    with pytest.raises(CommError) as caught:
        differently()
    return str(caught.value)


CASES = {
    "another expert": (False, rf"{GATHER}'experts\.0' #\d+; .*{GATHER}'experts\.1' #\d+"),
    "uneven generate": (True, rf"barrier\(\) #\d+; .*{GATHER}'\(root\)' #\d+"),
}


@pytest.mark.covers("names of calls")
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_gather_different_units_all_name_them(case: str) -> None:
    uneven, said = CASES[case]
    for message in run_threads(lambda comm: failure(comm, uneven=uneven), 2):
        assert re.search(said, message), message
        assert "tag" not in message


def failure_of_process(uneven: bool) -> str:
    with Communicator.from_env(deadline_s=DEADLINE_S, transport="shm", device="cpu") as comm:
        return failure(comm, uneven=uneven)


@pytest.mark.covers("names of calls")
def test_processes_name_them_too() -> None:
    for message in launch(failure_of_process, 2, (False,), timeout_s=DEADLINE_S):
        assert re.search(CASES["another expert"][1], message), message


def test_a_rank_that_does_not_come_is_told_with_the_unit() -> None:
    def body(comm: Communicator) -> str:
        tag = comm.tag("unit 'blocks.3'")
        comm.barrier()
        if comm.rank == 1:
            return ""
        with pytest.raises(CommError) as caught:
            comm.reduce_scatter(torch.zeros(2), torch.zeros(4), tag=tag)
        return str(caught.value)

    message, _ = run_threads(body, 2, deadline_s=0.3)
    call = "reduce_scatter(f32, count 2, sum) of unit 'blocks.3' #1"
    assert f"did not come within 0.3 s; rank 0 was in {call}, the last call of rank 1" in message


@pytest.mark.parametrize("strategy", ["no_shard", "hybrid_shard"])
def test_an_all_reduce_of_gradients_is_told_with_the_unit(strategy: str) -> None:
    def body(mesh: Mesh) -> str:
        model = Experts()
        hybrid = strategy == "hybrid_shard"
        units = list(model.experts)
        fully_shard(model, mesh if hybrid else mesh.replicate, units=units, strategy=strategy)
        model(torch.ones(1, 4), 2).sum().backward()
        loss = model(torch.ones(1, 4), 2).sum()
        other = partial(mesh.replicate.all_reduce, torch.zeros(7))
        with pytest.raises(CommError) as caught:
            (loss.backward if mesh.replicate.rank else other)()
        return str(caught.value)

    for message in run_mesh(body, 2, 1):
        assert re.search(r"all_reduce\(f32, count \d+, avg\) of unit 'experts\.2' #\d+", message)


def test_engines_on_one_communicator_share_no_tag() -> None:
    def body(comm: Communicator) -> str:
        models = [Experts() for _ in range(2)]
        for model in models:
            fully_shard(model, comm, units=list(model.experts))
        with pytest.raises(CommError) as caught:
            models[comm.rank](torch.ones(1, 4), 0)
        return str(caught.value)

    for message in run_threads(body, 2):
        assert re.search(
            rf"rank 0 called {GATHER}'\(root\)' #\d+; rank 1 called {GATHER}'\(root\)' \(2\) #\d+",
            message,
        )


def test_tags_of_callers_keep_their_number() -> None:
    def body(comm: Communicator) -> str:
        comm.tag("unit 'a'")
        with pytest.raises(CommError) as caught:
            comm.barrier(tag=comm.rank)
        return str(caught.value)

    for message in run_threads(body, 2):
        assert "called barrier() #1; rank 1 called barrier(tag 1) #1" in message


# What is said of a name: all of it, the characters that there is room for, or nothing and the tag has its number.
NAMES = {
    "plain": ("unit 'a'", " of unit 'a'"),
    "long": ("ä" * 100, " of " + "ä" * 62),
    "no text": ("a\udcff", r" of a\udcff"),
    "empty": ("", None),
}


@pytest.mark.parametrize("kind", NAMES)
def test_any_name_can_be_given(kind: str) -> None:
    name, said = NAMES[kind]

    def body(comm: Communicator) -> str:
        tag = comm.tag(name)
        comm.barrier()
        with pytest.raises(CommError) as caught:
            comm.barrier(tag=tag if comm.rank == 0 else 0)
        return str(caught.value)

    for message in run_threads(body, 2):
        shown = f"(tag {FIRST_NAMED_TAG})" if said is None else f"(){said}"
        assert f"rank 0 called barrier{shown} #2; rank 1 called barrier() #2" in message


@pytest.mark.parametrize("names", [0, 1])
def test_a_name_that_one_rank_has_given_is_told_on_all(names: int) -> None:
    """The other one has not come to its own `tag` yet."""

    def body(comm: Communicator) -> str:
        tag = comm.tag("unit 'a'") if comm.rank == names else 0
        with pytest.raises(CommError) as caught:
            comm.barrier(tag=tag)
        return str(caught.value)

    for message in run_threads(body, 2):
        assert f"rank {names} called barrier() of unit 'a' #1" in message


def test_more_tags_than_there_is_room_for_have_numbers() -> None:
    comm = Communicator.local_group(1)[0]
    tags = [comm.tag(f"unit {i}") for i in range(1100)]
    assert len(set(tags)) == 1100


def one_waits(folder: Path, transport: Literal["shm", "c10d"]) -> Pending | None:
    with Communicator.from_env(deadline_s=DEADLINE_S, transport=transport, device="cpu") as comm:
        tags = [comm.tag(f"unit 'blocks.{i}'") for i in range(2)]
        comm.barrier()
        if comm.rank == 1:
            wait_at(folder / "gate")
            comm.all_gather(torch.zeros(4), torch.zeros(2), tag=tags[1])
            return None
        (folder / "pid").write_text(str(os.getpid()))
        seen: list[Pending] = []
        work = comm.all_gather(
            torch.zeros(4), torch.zeros(2), tag=tags[1], stream=comm.streams.gather
        )
        end = time.monotonic() + DEADLINE_S
        while not seen and time.monotonic() < end:
            seen = [p for p in comm.pending() if p.rank == 0 and p.call and p.waiting_s]
        (folder / "seen").touch()
        assert work is not None
        work.wait()
        return seen[0]


@pytest.mark.covers("names of calls", "what ranks are in")
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_who_looks_on_sees_the_name(tmp_path: Path, transport: str) -> None:
    gate = Gate(tmp_path)
    with launched(one_waits, 2, (tmp_path, transport), gate) as results:
        until((tmp_path / "seen").exists, "rank 0 has seen itself wait")
        if transport == "shm":
            pid = int((tmp_path / "pid").read_text())
            found = [g for g in groups.find().groups if g.ranks[0].pid == pid]
            assert found[0].ranks[0].calls[0].call == "all_gather(f32, count 2) of unit 'blocks.1'"
    seen = results[0]
    assert isinstance(seen, Pending)
    assert seen.call is not None
    assert seen.call.endswith(" of unit 'blocks.1'")
    assert str(seen).startswith(f"in {seen.call} #")
