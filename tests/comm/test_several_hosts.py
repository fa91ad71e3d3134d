"""Several hosts, which share memory inside and exchange through Gloo. They are one host here that says it is two."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcomm import CommError, Communicator, Receipt, fully_shard, launch
from shardcomm.comm import introduction
from shardcomm.comm.hosts import place_of
from shardcomm.comm.words import Transport
from support.gates import until
from support.interpreters import run_ranks
from support.nets import batch, loss_of, make, sgd_of
from support.rank_sums import combined

RANKS = 4

pytestmark = pytest.mark.usefixtures("nothing_is_left_in_shared_memory")


def host_of(rank: int) -> str:
    return "AABB"[rank]


def connected(
    transport: Transport = "auto",
    hosts: Callable[[int], str] = host_of,
    deadline_s: float = 60.0,
) -> Communicator:
    rank = int(os.environ["RANK"])
    introduction.host_identity = lambda: hosts(rank)  # type: ignore[assignment]
    return Communicator.from_env(transport=transport, deadline_s=deadline_s)


def drawn(seed: int, rank: int, numel: int) -> torch.Tensor:
    """Of very different sizes, so that sums are rounded otherwise in another order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    exponents = torch.randint(-12, 12, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), exponents)


def collectives(seed: int, hosts: str) -> list[Receipt]:
    with connected(hosts=lambda rank: hosts[rank]) as comm:
        assert (comm.transport, comm.size) == ("hosts", RANKS)
        for numel in (1, 63, 1000, 300_000):
            counts = [numel, 0, 2 * numel, 5]
            parts = [drawn(seed, r, n) for r, n in enumerate(counts)]
            own = parts[comm.rank]
            for full in (torch.empty(sum(counts)), comm.allocate(sum(counts), use="gather")):
                comm.all_gather(full, own, counts=counts)
                assert full.equal(torch.cat(parts))
            halves = torch.empty(sum(counts), dtype=torch.bfloat16)
            comm.all_gather(halves, own, counts=counts)
            assert halves.equal(torch.cat(parts).bfloat16())

            everybody = [drawn(seed + 1, r, RANKS * numel) for r in range(RANKS)]
            rows = slice(comm.rank * numel, (comm.rank + 1) * numel)
            send = comm.allocate(RANKS * numel, use="reduce")
            send.copy_(everybody[comm.rank])
            shard = torch.empty(numel)
            comm.reduce_scatter(shard, send)
            assert shard.equal(combined(everybody)[rows])
            comm.reduce_scatter(shard, send, "avg", scale=0.5, accumulate=True)
            torch.testing.assert_close(shard, combined(everybody)[rows] * (1 + 0.5 / RANKS))
            half = torch.empty(numel, dtype=torch.bfloat16)
            comm.reduce_scatter(half, send.bfloat16())
            sums = combined([each.bfloat16().float() for each in everybody])
            assert half.equal(sums[rows].bfloat16())

            whole = everybody[comm.rank].clone()
            with_stream = everybody[comm.rank].clone()
            comm.all_reduce(whole)
            comm.all_reduce(with_stream, "max", stream=comm.streams.reduce).wait()
            assert whole.equal(combined(everybody))
            assert with_stream.equal(torch.stack(everybody).amax(0))
            for root in range(RANKS):
                buffer = everybody[comm.rank].clone()
                comm.broadcast(buffer, root)
                assert buffer.equal(everybody[root])
        gather = comm.bind_all_gather(full, own, counts=counts)
        full.zero_()
        gather()
        comm.barrier()
        assert full.equal(torch.cat(parts))
        return comm.receipts()


@pytest.mark.covers("collectives", transports=["hosts"])
@pytest.mark.parametrize("hosts", ["AABB", "ABCD"])
def test_collectives_are_those_of_torch(seed: int, hosts: str) -> None:
    for receipts in launch(collectives, RANKS, (seed, hosts), timeout_s=120):
        assert {receipt.taken for receipt in receipts} == {"hosts"}
        operations = {receipt.operation for receipt in receipts}
        assert operations >= {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"}


def summed(transport: Transport, numel: int) -> torch.Tensor:
    hosts = host_of if transport == "hosts" else lambda _: "one"
    with connected(transport, hosts) as comm:
        total = drawn(7, comm.rank, numel)
        comm.all_reduce(total)
        return total


@pytest.mark.parametrize("numel", [10, 5000, 400_000])
def test_sums_have_the_bits_of_shm(numel: int) -> None:
    over_hosts, over_shm = (
        launch(summed, RANKS, (transport, numel), timeout_s=120) for transport in ("hosts", "shm")
    )
    for each in over_hosts + over_shm:
        assert each.equal(over_hosts[0])


def fails(how: Callable[[Communicator], Any], over_group: bool) -> tuple[str, str | None]:
    comm = over_a_group() if over_group else connected(deadline_s=20.0)
    comm.barrier()
    try:
        how(comm)
        for _ in range(3):
            comm.barrier()
    except CommError as error:
        with pytest.raises(CommError):
            comm.all_reduce(torch.ones(1))
        comm.close()
        return str(error), error.kind
    return "", None


def over_a_group() -> Communicator:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    introduction.host_identity = lambda: host_of(rank)  # type: ignore[assignment]
    return Communicator.from_process_group(deadline_s=20.0)


def again_and_again() -> None:
    """Rank 0 has a group that no other rank has; the communicators have the same ranks, one after another."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    introduction.host_identity = lambda: host_of(rank)  # type: ignore[assignment]
    for _ in range(5):
        with Communicator.from_process_group(deadline_s=20.0) as comm:
            assert comm.transport == "hosts"
            total = torch.ones(3)
            comm.all_reduce(total)
            assert total.tolist() == [RANKS] * 3
    dist.destroy_process_group()


def test_communicators_of_one_group_after_another() -> None:
    launch(again_and_again, RANKS, timeout_s=120)


def calls_something_else(comm: Communicator) -> None:
    comm.all_reduce(torch.ones(3 if comm.rank == 3 else 4))


def gives_other_counts(comm: Communicator) -> None:
    counts = [1, 2, 3, 4] if comm.rank < 2 else [2, 1, 3, 4]
    comm.all_gather(torch.empty(10), torch.empty(counts[comm.rank]), counts=counts)


def aborts(comm: Communicator) -> None:
    if comm.rank == 2:
        comm.abort("enough")


def leaves(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.close()


@pytest.mark.covers("failed ranks", transports=["hosts"])
@pytest.mark.parametrize("over_group", [False, True], ids=["env", "group"])
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        (calls_something_else, "mismatch", ("all_reduce(f32, count 3", "rank 3")),
        (gives_other_counts, "mismatch", ("different counts to all_gather(",)),
        (aborts, "aborted", ("rank 2", "enough")),
        (leaves, "closed", ("rank 1",)),
    ],
    ids=["other-call", "other-counts", "abort", "close"],
)
def test_what_goes_wrong_ends_all_ranks(
    how: Callable[[Communicator], Any], kind: str, words: tuple[str, ...], over_group: bool
) -> None:
    errors = launch(fails, RANKS, (how, over_group), timeout_s=15)
    told = [text for text, of in errors if of == kind]
    assert told, errors
    assert any(all(word in text for word in words) for text in told), told
    assert all(of is not None for _, of in errors), errors


def dies(rank_that_dies: int, folder: Path) -> None:
    comm = connected(deadline_s=30.0)
    step = 0
    try:
        while True:
            comm.all_reduce(torch.ones(100_000))
            step += 1
            if step == 5 and comm.rank == rank_that_dies:
                os.kill(os.getpid(), signal.SIGKILL)
    except CommError as error:
        comm.close()
        (folder / str(comm.rank)).write_text(f"{error.kind}: {error}")


@pytest.mark.covers("failed ranks", transports=["hosts"])
def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="rank 2 was killed by SIGKILL"):
        launch(dies, RANKS, (2, tmp_path), timeout_s=25)
    said = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    assert set(said) == {0, 1, 3}
    assert said[3].startswith("died: rank 2")
    for on_other_host in (said[0], said[1]):  # where it is nobody's fault
        assert on_other_host.startswith("backend: ")
        assert "lost the ranks of other hosts with which it exchanges, rank " in on_other_host


def dies_alone_on_its_host(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    comm = connected(hosts=str, deadline_s=30.0)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as error:
        comm.all_reduce(torch.ones(100_000))
    (folder / str(rank)).write_text(f"{error.value.kind}: {error.value}")


@pytest.mark.covers("failed ranks", transports=["hosts"])
def test_a_rank_that_is_alone_on_its_host_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="rank 2 was killed by SIGKILL"):
        launch(dies_alone_on_its_host, RANKS, (tmp_path,), timeout_s=25)
    said = [(tmp_path / rank).read_text() for rank in "013"]
    assert all(text.startswith("backend: ") for text in said)
    ended = r": (send to |receive from )?host 2(:| has closed the connection)"
    assert any(re.search(ended, text) for text in said), said


def dies_before_the_other_of_its_host_comes(folder: Path) -> None:
    comm = connected(deadline_s=30.0)
    comm.all_reduce(torch.ones(1))
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 3:
        until((folder / "1").exists, "rank 1 has heard of it")
    with pytest.raises(CommError) as error:
        comm.all_reduce(torch.ones(1))
    written = folder / f"{comm.rank} is being written"
    written.write_text(f"{error.value.kind}, {error.value.rank}: {error.value}")
    written.rename(folder / str(comm.rank))


@pytest.mark.covers("failed ranks", transports=["hosts"])
def test_who_has_lost_a_rank_of_another_host_is_not_its_own_hosts_culprit(tmp_path: Path) -> None:
    """Rank 0 exchanges with rank 2, and rank 1 with rank 3, which is there: it hears of it from rank 0 alone."""
    with pytest.raises(Exception, match="rank 2 was killed by SIGKILL"):
        launch(dies_before_the_other_of_its_host_comes, RANKS, (tmp_path,), timeout_s=25)
    words = "rank 0, in all_reduce(f32, count 1, sum) #4, lost the ranks of other hosts with which it exchanges, rank 2"
    for rank in "01":
        assert (tmp_path / rank).read_text().startswith(f"backend, None: {words} of host 1: ")


def dies_with_its_host(folder: Path) -> None:
    comm = connected(deadline_s=20.0)
    comm.barrier()
    if comm.rank >= 2:
        if os.fork() == 0:  # a worker of a DataLoader, for instance
            until((folder / "1").exists, "rank 1 has heard of it")
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as error:
        comm.all_reduce(torch.ones(100_000))
    (folder / str(comm.rank)).write_text(error.value.kind)


@pytest.mark.covers("failed ranks", transports=["hosts"])
def test_children_of_a_host_that_has_died_do_not_hide_it(tmp_path: Path) -> None:
    """They have copies of its connections, which would stay open."""
    with pytest.raises(Exception, match="was killed by SIGKILL"):
        launch(dies_with_its_host, RANKS, (tmp_path,), timeout_s=60)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["backend", "backend"]


ENDS_WITH_WORK_UNDER_WAY = """
import os, torch, shardcomm
from shardcomm.comm import introduction
rank = int(os.environ["RANK"])
introduction.host_identity = lambda: "AABB"[rank]
comm = shardcomm.Communicator.from_env(deadline_s=8.0)
if rank < 2:
    comm.all_reduce(torch.ones(100_000), stream=comm.streams.reduce)
else:  # so that the others' reduction waits in Gloo when their interpreters end
    try:
        comm.barrier()
    except shardcomm.CommError:  # the others are lost, or late where this rank's deadline passes first
        pass
"""


def test_a_process_ends_quietly_with_work_under_way_between_hosts() -> None:
    for ended in run_ranks(ENDS_WITH_WORK_UNDER_WAY, 4):
        assert ended.returncode == 0, ended.stderr


def what_is_taken(hosts: str, transport: Transport) -> tuple[str, str]:
    try:
        with connected(transport, lambda rank: hosts[rank]) as comm:
            comm.barrier()
            return comm.transport, comm.receipts()[0].reason
    except ValueError as error:
        return type(error).__name__, str(error)
    except CommError as error:  # another rank has raised it before this one came to it
        raised = re.search(r"gave up its set-up: (\w+): ", str(error))
        return raised[1] if raised else "CommError", str(error)


@pytest.mark.parametrize(
    ("hosts", "transport", "taken", "reason"),
    [
        ("AABB", "hosts", "hosts", ""),
        ("AABB", "c10d", "c10d", ""),
        (
            "AAB",
            "auto",
            "c10d",
            "the ranks are on several hosts, and the hosts have different numbers of ranks: 2, 1",
        ),
        (
            "ABAB",
            "auto",
            "c10d",
            "the ranks are on several hosts, and the ranks of a host are not numbered one after",
        ),
        ("AB", "auto", "hosts", ""),
        ("ABC", "hosts", "hosts", ""),
        (
            "AA",
            "hosts",
            "ValueError",
            "transport is 'hosts', but the ranks are on one host; use 'auto'",
        ),
        ("AABB", "shm", "SeveralHostsError", "use 'hosts', 'c10d' or 'auto'"),
    ],
)
def test_which_ranks_it_is_for(hosts: str, transport: Transport, taken: str, reason: str) -> None:
    for got, why in launch(what_is_taken, len(hosts), (hosts, transport), timeout_s=60):
        assert got == taken
        assert reason in why


def test_places_of_ranks() -> None:
    place = place_of(4, ["A", "A", "A", "B", "B", "B"])
    assert place == (1, 2, [3, 4, 5], [1, 4])


def trains(steps: int) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    introduction.host_identity = lambda: host_of(rank)  # type: ignore[assignment]
    model, plain = make(layers=2), make(layers=2)
    engine = fully_shard(model, Communicator.from_process_group())
    assert engine.mesh.shard.transport == "hosts"
    ddp = torch.nn.parallel.DistributedDataParallel(plain)
    for each in (model, ddp):
        optimizer = sgd_of(each)
        for step in range(steps):
            loss_of(each, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    full = engine.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-5, atol=1e-6, msg=name)
    dist.destroy_process_group()
    return full


@pytest.mark.covers("training parity", strategies=["full_shard"], transports=["hosts"])
def test_training_over_two_hosts_is_ddp() -> None:
    launch(trains, RANKS, (3,), timeout_s=120)
