"""The `nccl` transport on GPUs, by pairs of processes that may share one.

NCCL takes long to connect two processes: what can share a pair does.
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

from shardcomm import _C, CommError, Communicator, launch
from support.nccl_ranks import (
    all_gather,
    all_reduce,
    allocate,
    connect,
    current_stream,
    receipt,
    reduce_scatter,
    shares_gpu,
    take_gpu,
)
from support.nets import make, reference, sgd_of, train
from support.random_collectives import OPS, reduced, values

pytestmark = pytest.mark.gpu
LAUNCH_S = 60.0

Check = Callable[[_C.Communicator], None]


def first_sums() -> None:
    comm = connect()
    value = torch.full((4,), comm.rank + 1.0, device="cuda")
    all_reduce(comm, value)
    assert value.tolist() == [comm.size * (comm.size + 1) / 2] * 4
    everybody = torch.zeros(2 * comm.size, device="cuda")
    all_gather(comm, everybody, torch.full((2,), float(comm.rank), device="cuda"))
    assert everybody.tolist() == [float(r) for r in range(comm.size) for _ in range(2)]
    comm.close()


def test_smoke_two_ranks_gather_and_sum() -> None:
    launch(first_sums, 2, timeout_s=LAUNCH_S)


def first_sum_of_torch() -> None:
    device = torch.device("cuda", take_gpu())
    dist.init_process_group("nccl", device_id=device)
    value = torch.ones(4, device=device)
    dist.all_reduce(value)
    assert value.tolist() == [float(os.environ["WORLD_SIZE"])] * 4
    dist.destroy_process_group()


def test_smoke_torchs_own_group_sums() -> None:
    """Where this fails too, the machine or its NCCL is at fault."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    launch(first_sum_of_torch, 2, timeout_s=LAUNCH_S)


def gathers(comm: _C.Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        everybody = [values(1, r, 1001, dtype) for r in range(comm.size)]
        result = torch.zeros(1001 * comm.size, dtype=dtype, device="cuda")
        all_gather(comm, result, everybody[comm.rank].cuda())
        assert torch.equal(result.cpu(), torch.cat(everybody))
        # In place, in the communicator's memory.
        window = allocate(comm, 1001 * comm.size, dtype, _C.Use.gather)
        assert not window.any()
        mine = window[comm.rank * 1001 : (comm.rank + 1) * 1001]
        mine.copy_(everybody[comm.rank])
        all_gather(comm, window, mine)
        assert torch.equal(window.cpu(), torch.cat(everybody))
    shards = [
        torch.randn(70001, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)
    ]
    for dtype in (torch.bfloat16, torch.float16):
        result = torch.zeros(70001 * comm.size, dtype=dtype, device="cuda")
        all_gather(comm, result, shards[comm.rank].cuda())
        assert torch.equal(result.cpu(), torch.cat(shards).to(dtype))


def reduces(comm: _C.Communicator) -> None:
    for case, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.int32)):
        for op in OPS:
            everybody = [values(case, r, 1001 * comm.size, dtype) for r in range(comm.size)]
            total = reduced(everybody, op)
            send = everybody[comm.rank].cuda()
            result = torch.zeros(1001, dtype=dtype, device="cuda")
            reduce_scatter(comm, result, send, op)
            own = total[comm.rank * 1001 : (comm.rank + 1) * 1001]
            assert torch.equal(result.cpu(), own), (dtype, op)
            if dtype is not torch.int32 or op != "avg":
                all_reduce(comm, send, op)
                assert torch.equal(send.cpu(), total), (dtype, op)


def epilogues(comm: _C.Communicator) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        everybody = [values(0, r, 777 * comm.size, dtype) for r in range(comm.size)]
        own = reduced(everybody, "sum")[comm.rank * 777 : (comm.rank + 1) * 777].float()
        result = torch.full((777,), 3.0, device="cuda")
        reduce_scatter(comm, result, everybody[comm.rank].cuda(), "sum", scale=0.5, accumulate=True)
        assert torch.equal(result.cpu(), 3 + own / 2)


def uneven_parts(comm: _C.Communicator) -> None:
    """The last rank has most, and rank 0 nothing."""
    counts = (0, *(3 + 500 * r for r in range(1, comm.size)))
    begin, own = sum(counts[: comm.rank]), counts[comm.rank]
    for dtype in (torch.float32, torch.bfloat16):
        everybody = [values(0, r, sum(counts), dtype) for r in range(comm.size)]
        result = torch.zeros(sum(counts), dtype=torch.bfloat16, device="cuda")
        mine = everybody[comm.rank][begin : begin + own]
        all_gather(comm, result, mine.cuda(), counts=counts)
        parts = [everybody[r].split(counts)[r] for r in range(comm.size)]
        assert torch.equal(result.cpu(), torch.cat(parts).bfloat16())
        assert receipt(comm, "all_gather")[3] == "broadcasts"
        total = reduced(everybody, "sum")[begin : begin + own].float()
        sums = torch.full((own,), 3.0, device="cuda")
        send = everybody[comm.rank].cuda()
        reduce_scatter(comm, sums, send, "sum", scale=0.5, accumulate=True, counts=counts)
        assert torch.equal(sums.cpu(), 3 + total / 2)
        taken = receipt(comm, "reduce_scatter")[3]
        assert (taken == "reduces") is (dtype is torch.float32)


def halves(comm: _C.Communicator) -> None:
    # 256 + 1 + 1 in bf16 steps of 2: rounding after each addition loses both ones.
    first = 256.0 if comm.rank == 0 else 1.0
    send = torch.full((3 * comm.size,), first, dtype=torch.bfloat16, device="cuda")
    result = torch.zeros(3, dtype=torch.bfloat16, device="cuda")
    reduce_scatter(comm, result, send)
    assert torch.equal(result.cpu(), torch.full((3,), 255.0 + comm.size).bfloat16())


def paths(comm: _C.Communicator) -> None:
    """bf16 is summed in fp32: by an exchange within a node, and hierarchically among nodes."""
    send = torch.ones(4 * comm.size, device="cuda")
    reduce_scatter(comm, torch.zeros(4, device="cuda"), send)
    assert receipt(comm, "reduce_scatter")[3] == "nccl"
    reduce_scatter(comm, torch.zeros(4, dtype=torch.bfloat16, device="cuda"), send.bfloat16())
    # Ranks that share a GPU may look like a node each.
    accepted = ("exchange", "hierarchical") if shares_gpu() else ("exchange",)
    assert receipt(comm, "reduce_scatter")[3] in accepted


def others(comm: _C.Communicator) -> None:
    for root in range(comm.size):
        value = torch.arange(1000, device="cuda") * (comm.rank + 1)
        comm.broadcast(value.data_ptr(), value.numel() * value.itemsize, root, current_stream())
        assert torch.equal(value.cpu(), torch.arange(1000) * (root + 1))
    for _ in range(3):
        comm.barrier(0, current_stream())
    torch.cuda.synchronize()
    empty = torch.zeros(0, device="cuda")
    all_gather(comm, empty, empty)
    assert receipt(comm, "all_gather")[1] == receipt(comm, "barrier")[1] + 1


def overlap(comm: _C.Communicator) -> None:
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    gathered = [torch.zeros(2 * comm.size, device="cuda") for _ in range(50)]
    summed = [torch.full((5,), float(comm.rank + i), device="cuda") for i in range(50)]
    mine = torch.full((2,), float(comm.rank), device="cuda")
    torch.cuda.synchronize()

    def gather() -> None:
        with torch.cuda.stream(streams[0]):
            for result in gathered:
                all_gather(comm, result, mine)

    thread = threading.Thread(target=gather)
    thread.start()
    with torch.cuda.stream(streams[1]):
        for value in summed:
            all_reduce(comm, value)
    thread.join()
    torch.cuda.synchronize()
    ranks = torch.arange(comm.size).float()
    for i in range(50):
        assert torch.equal(gathered[i].cpu(), ranks.repeat_interleave(2))
        assert torch.equal(summed[i].cpu(), torch.full((5,), float(ranks.sum()) + i * comm.size))


def refused(comm: _C.Communicator) -> None:
    value = torch.zeros(4, device="cuda")
    with pytest.raises(ValueError, match="count is -1"):
        comm.all_reduce(value.data_ptr(), _C.DType.f32, -1, _C.RedOp.sum, current_stream())
    with pytest.raises(ValueError, match="send is null"):
        comm.all_gather(0, _C.DType.f32, value.data_ptr(), _C.DType.f32, 2, 0, current_stream())
    with pytest.raises(ValueError, match="root is 2; it must be a rank, 0 to 1"):
        comm.broadcast(value.data_ptr(), 16, 2, current_stream())
    all_reduce(comm, value)  # and it goes on


def captured(comm: _C.Communicator) -> None:
    mine = torch.zeros(64, device="cuda")
    result = torch.zeros(64 * comm.size, dtype=torch.bfloat16, device="cuda")
    all_gather(comm, result, mine)  # connects, which is no work for a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_gather(comm, result, mine)
    mine.fill_(comm.rank + 1.0)
    graph.replay()
    torch.cuda.synchronize()
    ranks = torch.arange(1, comm.size + 1)
    assert torch.equal(result.cpu(), ranks.repeat_interleave(64).bfloat16())
    del graph


def memory_outlives() -> None:
    comm = connect()
    window = allocate(comm, 1 << 20, torch.float32, _C.Use.gather)
    early = allocate(comm, 1 << 10, torch.float32, _C.Use.reduce)
    _, _, requested, taken, reason = receipt(comm, "allocate")
    assert requested == "window"
    assert (taken == "window") == (reason == "")
    del early
    window.fill_(7)
    comm.close()
    comm.close()
    del comm
    assert torch.equal(window.cpu(), torch.full((1 << 20,), 7.0))


def run_checks(*checks: Check) -> None:
    """All of them over one communicator; a check that fails does not hide the next ones, unless it ends the group."""
    comm = connect()
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
def test_collectives_are_torchs() -> None:
    checks = (gathers, reduces, epilogues, uneven_parts, halves, paths, others, refused, overlap)
    launch(run_checks, 2, checks, timeout_s=LAUNCH_S)


@pytest.mark.covers("streams and lifetimes")
def test_a_gather_is_captured_in_a_graph() -> None:
    launch(run_checks, 2, (captured,), timeout_s=LAUNCH_S)


def test_memory_outlives_its_communicator() -> None:
    launch(memory_outlives, 2, timeout_s=LAUNCH_S)


def errors_after(comm: _C.Communicator) -> str:
    """What every call says from now on."""
    with pytest.raises(CommError) as caught:
        comm.barrier(0, current_stream())
    with pytest.raises(CommError) as again:
        all_reduce(comm, torch.zeros(4, device="cuda"))
    assert str(caught.value) == str(again.value)
    return str(caught.value)


def other_rank_dies(rank: int, port: int, tell: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    comm = connect(deadline_s=15.0)
    value = torch.zeros(4, device="cuda")
    all_reduce(comm, value)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(CommError):  # NCCL may have noticed already
        all_reduce(comm, value)
    torch.cuda.synchronize()  # ends, as the watchdog aborts
    tell.send(errors_after(comm))


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
    all_reduce(comm, value)
    torch.cuda.synchronize()
    with suppress(CommError):  # a first call connects, and may wait for that itself
        if comm.rank == 0:  # the other has gone to another channel
            all_reduce(comm, value)
        else:
            comm.barrier(0, current_stream())
    torch.cuda.synchronize()
    return errors_after(comm)


@pytest.mark.covers("different calls")
def test_mismatch_ends_at_the_deadline() -> None:
    first, second = launch(mismatch, 2, timeout_s=LAUNCH_S)
    assert first.startswith("rank 0 of 2: all_reduce(f32, count 4, sum) #2 ")
    assert second.startswith("rank 1 of 2: barrier() #1 ")


def aborted() -> str:
    comm = connect()
    value = torch.zeros(4, device="cuda")
    all_reduce(comm, value)
    torch.cuda.synchronize()
    if comm.rank == 0:
        all_reduce(comm, value)  # the other never comes
        comm.abort("enough")
        torch.cuda.synchronize()
        return errors_after(comm)
    comm.abort("enough")
    return errors_after(comm)


@pytest.mark.covers("abort and close")
def test_abort_ends_what_runs() -> None:
    messages = launch(aborted, 2, timeout_s=LAUNCH_S)
    assert messages == [f"rank {rank} of 2: aborted: enough" for rank in range(2)]


def train_10_steps() -> dict[str, torch.Tensor]:
    device = f"cuda:{take_gpu()}"
    with Communicator.from_env(transport="nccl", device=device, deadline_s=30) as comm:
        assert comm.transport == "nccl"
        state = train(comm, make(), steps=10, optimizer_of=sgd_of)
    return {name: value.cpu() for name, value in state.items()}


@pytest.mark.covers("training parity")
def test_training_equals_the_cpus() -> None:
    expected = reference(make(), 2, steps=10, optimizer_of=sgd_of).state_dict()
    for state in launch(train_10_steps, 2, timeout_s=LAUNCH_S):
        for name, value in expected.items():
            if not name.endswith("calls"):
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)
