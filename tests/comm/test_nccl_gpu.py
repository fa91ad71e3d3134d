"""The `nccl` transport on GPUs, by pairs of processes that may share one.

NCCL takes long to connect two processes: what can share a pair does. What is no matter of NCCL alone runs over `shm`
too, which shows on a machine without a GPU that the test itself is right.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from shardcomm import CommError, Communicator, Receipt, launch
from support.nccl_ranks import connect, shares_gpu, take_gpu
from support.nets import make, reference, sgd_of, train
from support.random_collectives import OPS, reduced, values

TRANSPORTS = ["shm", pytest.param("nccl", marks=pytest.mark.gpu)]
LAUNCH_S = 60.0

Check = Callable[[Communicator], None]


def group_over(transport: str) -> Communicator:
    """The launched ranks."""
    if transport == "nccl":
        return connect()
    return Communicator.from_env(transport="shm", device="cpu", deadline_s=30)


def receipt(comm: Communicator, operation: str) -> Receipt:
    (found,) = [each for each in comm.receipts() if each.operation == operation]
    return found


def first_sums(transport: str) -> None:
    comm = group_over(transport)
    value = torch.full((4,), comm.rank + 1.0, device=comm.device)
    comm.all_reduce(value)
    assert value.tolist() == [comm.size * (comm.size + 1) / 2] * 4
    everybody = torch.zeros(2 * comm.size, device=comm.device)
    comm.all_gather(everybody, torch.full((2,), float(comm.rank), device=comm.device))
    assert everybody.tolist() == [float(r) for r in range(comm.size) for _ in range(2)]
    comm.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_smoke_two_ranks_gather_and_sum(transport: str) -> None:
    launch(first_sums, 2, (transport,), timeout_s=LAUNCH_S)


def first_sum_of_torch() -> None:
    device = take_gpu()
    dist.init_process_group("nccl", device_id=device)
    value = torch.ones(4, device=device)
    dist.all_reduce(value)
    assert value.tolist() == [float(os.environ["WORLD_SIZE"])] * 4
    dist.destroy_process_group()


@pytest.mark.gpu
def test_smoke_torchs_own_group_sums() -> None:
    """Where this fails too, the machine or its NCCL is at fault."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    launch(first_sum_of_torch, 2, timeout_s=LAUNCH_S)


def gathers(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        everybody = [values(1, r, 1001, dtype) for r in range(comm.size)]
        result = torch.zeros(1001 * comm.size, dtype=dtype, device=comm.device)
        comm.all_gather(result, everybody[comm.rank].to(comm.device))
        assert torch.equal(result.cpu(), torch.cat(everybody))
        # In place, in the communicator's memory.
        window = comm.allocate(1001 * comm.size, dtype=dtype, use="gather")
        assert not window.any()
        comm.barrier()
        mine = window[comm.rank * 1001 : (comm.rank + 1) * 1001]
        mine.copy_(everybody[comm.rank])
        comm.all_gather(window, mine)
        assert torch.equal(window.cpu(), torch.cat(everybody))
    shards = [
        torch.randn(70001, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)
    ]
    for dtype in (torch.bfloat16, torch.float16):
        result = torch.zeros(70001 * comm.size, dtype=dtype, device=comm.device)
        comm.all_gather(result, shards[comm.rank].to(comm.device))
        assert torch.equal(result.cpu(), torch.cat(shards).to(dtype))


def reduces(comm: Communicator) -> None:
    for case, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.int32)):
        for op in OPS:
            everybody = [values(case, r, 1001 * comm.size, dtype) for r in range(comm.size)]
            total = reduced(everybody, op)
            send = everybody[comm.rank].to(comm.device)
            result = torch.zeros(1001, dtype=dtype, device=comm.device)
            comm.reduce_scatter(result, send, op)
            own = total[comm.rank * 1001 : (comm.rank + 1) * 1001]
            assert torch.equal(result.cpu(), own), (dtype, op)
            if dtype is not torch.int32 or op != "avg":
                comm.all_reduce(send, op)
                assert torch.equal(send.cpu(), total), (dtype, op)


def large_reduces(comm: Communicator) -> None:
    """Out of the communicator's memory, of more than NCCL sends by its protocol for few bytes."""
    part = 1 << 24 if comm.transport == "nccl" else 1 << 15
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = comm.allocate(part * comm.size, dtype=dtype, use="reduce")
        result = torch.zeros(part, dtype=dtype, device=comm.device)
        for round in range(2):
            own.copy_(torch.arange(part * comm.size, device=comm.device) % 97 + comm.rank + round)
            comm.reduce_scatter(result, own)
        begin = comm.rank * part
        every = torch.arange(begin, begin + part) % 97
        expected = comm.size * (every + 1) + comm.size * (comm.size - 1) // 2
        assert torch.equal(result.cpu(), expected.to(dtype)), dtype


def epilogues(comm: Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        everybody = [values(0, r, 777 * comm.size, dtype) for r in range(comm.size)]
        own = reduced(everybody, "sum")[comm.rank * 777 : (comm.rank + 1) * 777].float()
        result = torch.full((777,), 3.0, device=comm.device)
        send = everybody[comm.rank].to(comm.device)
        comm.reduce_scatter(result, send, "sum", scale=0.5, accumulate=True)
        assert torch.equal(result.cpu(), 3 + own / 2)


def uneven_parts(comm: Communicator) -> None:
    """The last rank has most, and rank 0 nothing."""
    counts = (0, *(3 + 500 * r for r in range(1, comm.size)))
    begin, own = sum(counts[: comm.rank]), counts[comm.rank]
    for dtype in (torch.float32, torch.bfloat16):
        everybody = [values(0, r, sum(counts), dtype) for r in range(comm.size)]
        result = torch.zeros(sum(counts), dtype=torch.bfloat16, device=comm.device)
        mine = everybody[comm.rank][begin : begin + own]
        comm.all_gather(result, mine.to(comm.device), counts=counts)
        parts = [everybody[r].split(counts)[r] for r in range(comm.size)]
        assert torch.equal(result.cpu(), torch.cat(parts).bfloat16())
        total = reduced(everybody, "sum")[begin : begin + own].float()
        sums = torch.full((own,), 3.0, device=comm.device)
        send = everybody[comm.rank].to(comm.device)
        comm.reduce_scatter(sums, send, "sum", scale=0.5, accumulate=True, counts=counts)
        assert torch.equal(sums.cpu(), 3 + total / 2)
        if comm.transport == "nccl":
            assert receipt(comm, "all_gather").taken == "broadcasts"
            taken = receipt(comm, "reduce_scatter").taken
            assert (taken == "reduces") is (dtype is torch.float32)


def large_uneven_gathers(comm: Communicator) -> None:
    """Into the communicator's memory, from where nobody else can read."""
    most = 1 << 24 if comm.transport == "nccl" else 1 << 15
    counts = tuple(most + 1000 * r for r in range(comm.size))
    window = comm.allocate(sum(counts), use="gather")
    mine = torch.full((counts[comm.rank],), comm.rank + 1.0, device=comm.device)
    for _ in range(2):
        comm.all_gather(window, mine, counts=counts)
    expected = torch.cat([torch.full((count,), r + 1.0) for r, count in enumerate(counts)])
    assert torch.equal(window.cpu(), expected)


def halves(comm: Communicator) -> None:
    # 256 + 1 + 1 in bf16 steps of 2: rounding after each addition loses both ones.
    first = 256.0 if comm.rank == 0 else 1.0
    send = torch.full((3 * comm.size,), first, dtype=torch.bfloat16, device=comm.device)
    result = torch.zeros(3, dtype=torch.bfloat16, device=comm.device)
    comm.reduce_scatter(result, send)
    assert torch.equal(result.cpu(), torch.full((3,), 255.0 + comm.size).bfloat16())


def paths(comm: Communicator) -> None:
    """bf16 is summed in fp32: by an exchange within a node, and hierarchically among nodes."""
    send = torch.ones(4 * comm.size, device=comm.device)
    comm.reduce_scatter(torch.zeros(4, device=comm.device), send)
    assert receipt(comm, "reduce_scatter").taken == "nccl"
    half = torch.zeros(4, dtype=torch.bfloat16, device=comm.device)
    comm.reduce_scatter(half, send.bfloat16())
    # Ranks that share a GPU may look like a node each.
    accepted = ("exchange", "hierarchical") if shares_gpu() else ("exchange",)
    assert receipt(comm, "reduce_scatter").taken in accepted


def others(comm: Communicator) -> None:
    for root in range(comm.size):
        value = torch.arange(1000, device=comm.device) * (comm.rank + 1)
        comm.broadcast(value, root)
        assert torch.equal(value.cpu(), torch.arange(1000) * (root + 1))
    for _ in range(3):
        comm.barrier()
    empty = torch.zeros(0, device=comm.device)
    comm.all_gather(empty, empty)
    assert receipt(comm, "all_gather").sequence == receipt(comm, "barrier").sequence + 1


def refused(comm: Communicator) -> None:
    value = torch.zeros(4, device=comm.device)
    with pytest.raises(ValueError, match="recv has 4 elements"):
        comm.all_gather(value, torch.zeros(3, device=comm.device))
    with pytest.raises(ValueError, match="root is 2; it must be a rank"):
        comm.broadcast(value, 2)
    comm.all_reduce(value)  # and it goes on


def overlap(comm: Communicator) -> None:
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    gathered = [torch.zeros(2 * comm.size, device="cuda") for _ in range(50)]
    summed = [torch.full((5,), float(comm.rank + i), device="cuda") for i in range(50)]
    mine = torch.full((2,), float(comm.rank), device="cuda")
    torch.cuda.synchronize()

    def gather() -> None:
        with torch.cuda.device(comm.device), torch.cuda.stream(streams[0]):
            for result in gathered:
                comm.all_gather(result, mine)

    thread = threading.Thread(target=gather)
    thread.start()
    with torch.cuda.stream(streams[1]):
        for value in summed:
            comm.all_reduce(value)
    thread.join()
    torch.cuda.synchronize()
    ranks = torch.arange(comm.size).float()
    for i in range(50):
        assert torch.equal(gathered[i].cpu(), ranks.repeat_interleave(2))
        assert torch.equal(summed[i].cpu(), torch.full((5,), float(ranks.sum()) + i * comm.size))


def captured(comm: Communicator) -> None:
    mine = torch.zeros(64, device="cuda")
    result = torch.zeros(64 * comm.size, dtype=torch.bfloat16, device="cuda")
    comm.all_gather(result, mine)  # connects, which is no work for a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_gather(result, mine)
    mine.fill_(comm.rank + 1.0)
    graph.replay()
    torch.cuda.synchronize()
    ranks = torch.arange(1, comm.size + 1)
    assert torch.equal(result.cpu(), ranks.repeat_interleave(64).bfloat16())
    del graph


def memory_outlives(transport: str) -> None:
    comm = group_over(transport)
    window = comm.allocate(1 << 20, use="gather")
    early = comm.allocate(1 << 10, use="reduce")
    if transport == "nccl":
        made = receipt(comm, "allocate")
        assert made.requested == "window"
        assert (made.taken == "window") == (made.reason == "")
    del early
    window.fill_(7)
    comm.close()
    comm.close()
    del comm
    assert torch.equal(window.cpu(), torch.full((1 << 20,), 7.0))


def run_checks(transport: str, *checks: Check) -> None:
    """All of them over one communicator; a check that fails does not hide the next ones, unless it ends the group."""
    comm = group_over(transport)
    failures = []
    for check in checks:
        try:
            check(comm)
        except Exception as error:
            failures.append(f"{check.__name__}: {traceback.format_exc()}")
            if isinstance(error, CommError):
                break
    if failures:
        raise AssertionError("\n".join(failures))
    comm.close()


@pytest.mark.covers("collectives")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives_are_torchs(transport: str) -> None:
    checks = [gathers, reduces, epilogues, uneven_parts, halves, others, refused]
    if transport == "nccl":
        checks += [paths, overlap]
    launch(run_checks, 2, (transport, *checks), timeout_s=LAUNCH_S)


@pytest.mark.covers("collectives")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_large_collectives_in_memory_of_the_communicator(transport: str) -> None:
    checks = (large_reduces, large_uneven_gathers)
    launch(run_checks, 2, (transport, *checks), timeout_s=LAUNCH_S)


@pytest.mark.gpu
@pytest.mark.covers("streams and lifetimes")
def test_a_gather_is_captured_in_a_graph() -> None:
    launch(run_checks, 2, ("nccl", captured), timeout_s=LAUNCH_S)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_outlives_its_communicator(transport: str) -> None:
    launch(memory_outlives, 2, (transport,), timeout_s=LAUNCH_S)


def errors_after(comm: Communicator) -> str:
    """What every call says from now on."""
    with pytest.raises(CommError) as caught:
        comm.barrier()
    with pytest.raises(CommError) as again:
        comm.all_reduce(torch.zeros(4, device="cuda"))
    assert str(caught.value) == str(again.value)
    return str(caught.value)


def other_rank_dies(rank: int, port: int, tell: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    comm = connect(deadline_s=15.0)
    value = torch.zeros(4, device="cuda")
    comm.all_reduce(value)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(CommError):  # NCCL may have noticed already
        comm.all_reduce(value)
    torch.cuda.synchronize()  # ends, as the watchdog aborts
    tell.send(errors_after(comm))


@pytest.mark.gpu
@pytest.mark.covers("dead rank")
def test_killed_rank_ends_the_other_within_the_deadline() -> None:
    context = get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listen, tell = context.Pipe(duplex=False)
    processes = [
        context.Process(target=other_rank_dies, args=(rank, store.port, tell)) for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        tell.close()
        assert listen.poll(LAUNCH_S)
        assert listen.recv().startswith("rank 0 of 2: ")
    finally:
        for process in processes:
            process.kill()
            process.join(10)
            process.close()


def mismatch() -> str:
    comm = connect(deadline_s=10.0)
    value = torch.zeros(4, device="cuda")
    comm.all_reduce(value)
    torch.cuda.synchronize()
    with suppress(CommError):  # a first call connects, and may wait for that itself
        if comm.rank == 0:  # the other has gone to another channel
            comm.all_reduce(value)
        else:
            comm.barrier()
    torch.cuda.synchronize()
    return errors_after(comm)


@pytest.mark.gpu
@pytest.mark.covers("different calls")
def test_mismatch_ends_at_the_deadline() -> None:
    first, second = launch(mismatch, 2, timeout_s=LAUNCH_S)
    assert first.startswith("rank 0 of 2: all_reduce(f32, count 4, sum) #2 ")
    assert second.startswith("rank 1 of 2: barrier() #1 ")


def aborted() -> str:
    comm = connect()
    value = torch.zeros(4, device="cuda")
    comm.all_reduce(value)
    torch.cuda.synchronize()
    if comm.rank == 0:
        comm.all_reduce(value)  # the other never comes
        comm.abort("enough")
        torch.cuda.synchronize()
        return errors_after(comm)
    comm.abort("enough")
    return errors_after(comm)


@pytest.mark.gpu
@pytest.mark.covers("abort and close")
def test_abort_ends_what_runs() -> None:
    messages = launch(aborted, 2, timeout_s=LAUNCH_S)
    assert messages == [f"rank {rank} of 2: aborted: enough" for rank in range(2)]


def train_10_steps(transport: str) -> dict[str, torch.Tensor]:
    with group_over(transport) as comm:
        assert comm.transport == transport
        state = train(comm, make(), steps=10, optimizer_of=sgd_of)
    return {name: value.cpu() for name, value in state.items()}


@pytest.mark.covers("training parity")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_equals_that_of_one_rank(transport: str) -> None:
    expected = reference(make(), 2, steps=10, optimizer_of=sgd_of).state_dict()
    for state in launch(train_10_steps, 2, (transport,), timeout_s=LAUNCH_S):
        for name, value in expected.items():
            if not name.endswith("calls"):
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)
