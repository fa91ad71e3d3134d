"""What c10d's callers do with a group of the backend: method forms, futures, threads, DDP and its hooks, tools."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from shardcomm import CommError, RankError, launch

gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left_in_shared_memory"),
    pytest.mark.covers("torch.distributed backend"),
]


def world(timeout_s: float = 60) -> Any:
    """The default group, of this backend; its methods are c10d's."""
    torch.set_num_threads(1)
    dist.init_process_group("shardcomm", timeout=timedelta(seconds=timeout_s))
    return dist.group.WORLD


def methods_without_options() -> None:
    group = world()
    rank, size = group.rank(), group.size()
    one = torch.full((3,), float(rank + 1))
    whole, parts, part = torch.empty(3 * size), [torch.empty(3) for _ in range(size)], one.clone()
    total = torch.full((3,), size * (size + 1) / 2)

    group.allgather(parts, one).wait()
    group._allgather_base(whole, one).wait()
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole, torch.arange(1.0, size + 1).repeat_interleave(3))
    group.reduce_scatter(part, [one] * size).wait()
    assert torch.equal(part, total)
    group._reduce_scatter_base(part, torch.cat([one] * size)).wait()
    assert torch.equal(part, total)
    group.allreduce([part]).wait()
    assert torch.equal(part, size * total)
    several = [one.clone(), one[:1].clone()]
    group.allreduce_coalesced(several).wait()
    assert torch.equal(several[0], total)
    assert several[1].item() == total[0]
    twice = one.clone()
    group.allreduce_coalesced([twice, twice]).wait()  # it is reduced once
    assert torch.equal(twice, total)
    for call in (group.allreduce, group.broadcast, group.allreduce_coalesced):
        with pytest.raises((ValueError, NotImplementedError), match=r"there are no|no tensor arg"):
            call([])
    for call in (group.allreduce, group.broadcast):
        with pytest.raises(ValueError, match="there are 2; there must be one: call a coalesced"):
            call([one, part])
    group.broadcast(part.copy_(one), 1).wait()
    assert torch.equal(part, torch.full((3,), 2.0))
    group.alltoall_base(whole, torch.cat([one] * size), [], []).wait()
    assert torch.equal(whole, torch.arange(1.0, size + 1).repeat_interleave(3))
    group.barrier().wait()
    dist.destroy_process_group()


def test_methods_without_options() -> None:
    launch(methods_without_options, 2, timeout_s=60)


def uneven_lists() -> None:
    group = world()
    rank, size = group.rank(), group.size()
    for dtype in (torch.float32, torch.int16):
        parts = [torch.empty(2 * r, 3, dtype=dtype) for r in range(size)]
        dist.all_gather(parts, torch.full((2 * rank, 3), rank, dtype=dtype))
        for r, part in enumerate(parts):
            assert part.eq(r).all()
    mine = torch.empty(2 * rank)
    dist.reduce_scatter(mine, [torch.full((2 * r,), r + rank / 4) for r in range(size)])
    assert mine.eq(size * rank + sum(range(size)) / 4).all()
    received = [torch.empty(r + rank) for r in range(size)]
    dist.all_to_all(received, [torch.full((r + rank,), 10.0 * rank + r) for r in range(size)])
    for r, part in enumerate(received):
        assert part.eq(10 * r + rank).all()
    dist.destroy_process_group()


def test_lists_whose_tensors_differ_in_size() -> None:
    launch(uneven_lists, 3, timeout_s=60)


def split_and_merge() -> None:
    group = world()
    backend = group._get_backend(torch.device("cpu"))
    assert backend.supports_splitting
    rank, size = group.rank(), group.size()
    last = group.split_group([2, 1], timedelta(seconds=30), None, "last two", "two of three")
    assert (last is None) == (rank == 0)
    if rank > 0:
        assert (last.size(), last.group_name) == (2, "last two")
        order = torch.empty(2)
        last._allgather_base(order, torch.tensor([float(rank)])).wait()
        # Some releases of torch sort the ranks, and others take them as they are given.
        assert order.tolist() in ([1, 2], [2, 1])
        assert order[last.rank()] == rank
        x = torch.full((3,), float(rank))
        last.allreduce([x]).wait()
        assert x.tolist() == [3, 3, 3]
        assert type(last._get_backend(torch.device("cpu"))) is type(backend)
        assert last._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=30)
    assert backend.options._timeout == timedelta(seconds=60)  # as it was
    # Ranks of any groups that meet in one store.
    store = dist.PrefixStore("all", dist.distributed_c10d._get_default_store())
    merged = (last or group).merge_remote_group(store, size, timedelta(seconds=30), "all", "")
    x = torch.ones(1)
    merged.allreduce([x]).wait()
    assert (merged.size(), x.item()) == (size, size)
    dist.barrier()
    dist.destroy_process_group()


def test_a_group_is_split_and_merged() -> None:
    launch(split_and_merge, 3, timeout_s=60)


def futures_in_futures() -> None:
    world()

    def deep(levels: int) -> torch.futures.Future[Any]:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        future = work.get_future()
        return future if levels == 0 else future.then(lambda _: deep(levels - 1).wait())

    [total] = deep(20).wait()
    assert total.tolist() == [2.0, 2.0]
    dist.destroy_process_group()


def test_a_callback_may_wait_for_other_futures() -> None:
    launch(futures_in_futures, 2, timeout_s=60)


def threads_of_many_groups() -> None:
    """Each thread has a group of its own, in which its order is the order of its thread on the other ranks."""
    world()
    groups = [dist.new_group() for _ in range(4)]
    wrong: list[object] = []

    def work(group: Any, seed: int) -> None:
        generator = random.Random(seed)
        try:
            for turn in range(50):
                x = torch.full((generator.randrange(1, 5000),), float(turn))
                dist.all_reduce(x, group=group)
                assert x.eq(2.0 * turn).all()
                dist.all_to_all_single(torch.empty(2 * turn), torch.ones(2 * turn), group=group)
        except BaseException as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=work, args=(group, seed)) for seed, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    dist.destroy_process_group()


def test_groups_in_several_threads() -> None:
    launch(threads_of_many_groups, 2, timeout_s=60)


def monitored() -> None:
    group = world()
    group.monitored_barrier(timedelta(seconds=50))
    if group.rank() == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier in 100 ms"):
            group.monitored_barrier(timedelta(milliseconds=100))
        with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to pass monitoredBarrier"):
            group.monitored_barrier(timedelta(milliseconds=100), True)
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            group.monitored_barrier(timedelta(0))
    x = torch.ones(1)
    dist.all_reduce(x)  # the barriers that failed have not harmed the group
    assert x.item() == 3
    if group.rank() > 0:
        for _ in range(3):
            with pytest.raises(
                RuntimeError, match="errors while waiting for send/recv from rank 0"
            ):
                group.monitored_barrier(timedelta(seconds=50))
    group.monitored_barrier(timedelta(seconds=50))
    dist.destroy_process_group()


def test_a_monitored_barrier_names_who_has_not_come() -> None:
    launch(monitored, 3, timeout_s=60)


def wait_for_a_message() -> None:
    group = world()
    x = torch.zeros(2)
    if group.rank() == 0:
        work = dist.irecv(x, 1)
        assert work is not None
        with pytest.raises(TimeoutError, match="has not ended within 50 ms"):
            work.wait(timedelta(milliseconds=50))
        dist.barrier()  # while it is under way
        work.wait()
        assert x.tolist() == [3, 4]
        dist.recv(torch.empty(0), 1)
        strided = torch.zeros(2, 2)
        dist.recv(strided[:, 1], 1)
        assert strided.tolist() == [[0, 5], [0, 7]]
        with pytest.raises(
            CommError, match=r"sent 8 bytes with tag 5 to rank 0 .* which called recv\(12 bytes"
        ):
            dist.recv(torch.zeros(3), 1, tag=5)
    else:
        dist.barrier()
        dist.send(torch.tensor([3.0, 4.0]), 0)
        dist.send(torch.empty(0), 0)
        dist.send(torch.tensor([[5.0, 6.0], [7.0, 8.0]])[:, 0], 0)
        dist.send(x, 0, tag=5)
        with pytest.raises(CommError):
            dist.barrier()


def test_a_message_may_be_waited_for_in_pieces_and_must_have_its_size() -> None:
    launch(wait_for_a_message, 2, timeout_s=60)


def large_message() -> None:
    world()
    x = torch.full((3_000_000,), float(dist.get_rank()))
    sent = dist.isend(x, 1) if dist.get_rank() == 0 else dist.recv(x, 0)
    dist.barrier()  # which rank 1 reaches with the whole message alone
    assert x.eq(0).all()
    if isinstance(sent, dist.Work):
        sent.wait()
    dist.destroy_process_group()


def test_a_large_message_moves_while_its_sender_does_other_things() -> None:
    launch(large_message, 2, timeout_s=60)


class Stopped(Exception):
    """What this test's signal handler raises, as Python's own raises KeyboardInterrupt."""


def stop_waiting(begin: Callable[[], Any]) -> None:
    group = world()
    store = dist.distributed_c10d._get_default_store()

    def stop(*_: object) -> None:
        raise Stopped

    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stopped):
            begin()
        group.abort()
        store.set("stopped", "")
    else:
        store.wait(["stopped"])
        with pytest.raises(CommError, match=r"rank 0 .*aborted"):
            dist.barrier()


def wait_for_nobody() -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(partial(dist.all_reduce, torch.ones(1)), id="synchronous"),
        pytest.param(wait_for_nobody, id="asynchronous"),
        pytest.param(partial(dist.recv, torch.ones(1), 1), id="message"),
    ],
)
def test_a_signal_handler_ends_a_wait(begin: Callable[[], Any]) -> None:
    """As Ctrl-C does."""
    launch(stop_waiting, 2, (begin,), timeout_s=60)


def fork_with_threads() -> None:
    group = world()
    for work in (dist.all_reduce(torch.ones(1), async_op=True), group.allreduce([torch.ones(1)])):
        work.wait()  # there is a thread now, which the child lacks
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except CommError:
            dist.destroy_process_group()
            del group, work
            gc.collect()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier()
    dist.destroy_process_group()


def test_a_forked_child_is_refused_and_ends() -> None:
    launch(fork_with_threads, 2, timeout_s=60)


def late_rank() -> None:
    world(timeout_s=1)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(3600)


def test_a_late_rank_is_told_of_as_the_groups_timeout() -> None:
    with pytest.raises(
        RankError, match=r"did not come within 1 s.*timeout of the call or, .* init_process_group"
    ):
        launch(late_rank, 2, timeout_s=60)


def train(wrap: Callable[[nn.Module], nn.Module], steps: int, **join: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def loop() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=generator)).square().sum().backward()
            optimizer.step()

    if join:
        with model.join(**join):  # type: ignore[operator, union-attr]
            loop()
    else:
        loop()
    return [parameter.detach().clone() for parameter in model.parameters()]


def power_sgd(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def hooked(hook: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend="aot_eager")  # type: ignore[return-value]


def train_all(backend: str) -> dict[str, list[torch.Tensor]]:
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=100))
    rank = dist.get_rank()
    uneven = 3 + 2 * rank
    results = {
        "PowerSGD": train(power_sgd, 5),
        "all-reduce hook": train(hooked(default_hooks.allreduce_hook), 3),
        "fp16 hook": train(hooked(default_hooks.fp16_compress_hook), 3),
        "compiled": train(compiled, 3),
        "join": train(DistributedDataParallel, uneven, divide_by_initial_world_size=False),
        "join, initial size": train(
            DistributedDataParallel, uneven, divide_by_initial_world_size=True
        ),
    }
    dist.destroy_process_group()
    return results


def test_ddp_with_hooks_uneven_inputs_and_the_compiler_is_bitwise_gloos() -> None:
    ours, gloos = (launch(train_all, 2, (name,), timeout_s=120) for name in ("shardcomm", "gloo"))
    for mine, theirs in zip(ours, gloos, strict=True):
        for way, wanted in theirs.items():
            for got, want in zip(mine[way], wanted, strict=True):
                assert torch.equal(got, want), way


def tools_see_collectives() -> None:
    world()
    x, whole = torch.ones(3), torch.empty(6)
    with CommDebugMode() as counts:
        dist.all_reduce(x)
        gather_into(whole, x)
    assert counts.get_total_counts() == 2
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(x)
        work = gather_into(whole, x, async_op=True)
        work.wait()
        dist.broadcast(x, 0)
    seen = {event.name for event in profile.function_events}
    assert {f"shardcomm:{name}" for name in ("all_reduce", "all_gather", "broadcast")} <= seen
    dist.destroy_process_group()


def test_the_profiler_and_comm_debug_mode_see_collectives() -> None:
    launch(tools_see_collectives, 2, timeout_s=60)


def tensors_without_memory() -> list[str]:
    group, one = world(), torch.ones(4)
    errors = []
    for part in (0, 1):  # from the beginning of what was freed, and from its middle
        freed = torch.ones(2, 4)[part]
        freed.untyped_storage().resize_(0)
        for call in (
            lambda freed=freed: dist.all_reduce(freed),
            lambda freed=freed: dist.broadcast(freed, 0),
            lambda freed=freed: gather_into(one.clone(), freed),
            lambda freed=freed: dist.all_to_all_single(one.clone(), freed),
            lambda freed=freed: group.allgather([[one.clone()]], [freed]),
        ):
            with pytest.raises(ValueError, match="has no memory") as caught:
                call()
            errors.append(str(caught.value))
    dist.all_reduce(one)  # and the group goes on
    dist.destroy_process_group()
    return errors


def test_tensors_whose_storage_was_freed_are_refused() -> None:
    """Where Gloo ends the process."""
    for error in launch(tensors_without_memory, 1, timeout_s=60)[0]:
        assert "a tensor of shape [4] has no memory: its storage was freed" in error
