"""Timeouts of the torch.distributed backend: a group's, one that is set later, and those of calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from shardcomm import CommError, launch
from shardcomm.comm import introduction

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left_in_shared_memory"),
    pytest.mark.covers("torch.distributed backend"),
]

LONG = timedelta(seconds=300)
SHORT = timedelta(milliseconds=300)
AGES = timedelta(days=365_000)  # more nanoseconds than a clock counts


def world(hosts: str = "") -> Any:
    """The default group, whose timeout no test waits for; its methods are c10d's."""
    torch.set_num_threads(1)
    if hosts:
        introduction.host_identity = lambda: hosts[int(os.environ["RANK"])]  # type: ignore[assignment]
    dist.init_process_group("shardcomm", timeout=LONG)
    return dist.group.WORLD


def with_timeout(options: Any, timeout: timedelta = SHORT) -> Any:
    options.timeout = timeout
    return options


def all_reduce(group: Any, options: Any) -> None:
    group.allreduce([torch.ones(3)], options).wait()


def all_gather(group: Any, options: Any) -> None:
    group.allgather([[torch.ones(3), torch.ones(3)]], [torch.ones(3)], options).wait()


def broadcast(group: Any, options: Any) -> None:
    group.broadcast([torch.ones(100)], options).wait()  # of few bytes the root waits for nobody


def barrier(group: Any, options: Any) -> None:
    group.barrier(options).wait()


CALLS = (
    (all_reduce, dist.AllreduceOptions),
    (all_gather, AllgatherOptions),
    (broadcast, dist.BroadcastOptions),
    (barrier, dist.BarrierOptions),
)


def late_for(call: Callable[[Any, Any], None], kind: type[Any], asynchronous: bool) -> None:
    group = world()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        options = with_timeout(kind())
        options.asyncOp = asynchronous
        with pytest.raises(CommError, match=r"within 0\.3 s.*the timeout of the call"):
            call(group, options)
        store.set("late", "")
    else:
        store.wait(["late"])
        with pytest.raises(CommError, match=r"within 0\.3 s"):
            dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(("call", "kind"), CALLS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_keeps_to_its_own_timeout(
    call: Callable[[Any, Any], None], kind: type[Any], asynchronous: bool
) -> None:
    launch(late_for, 2, (call, kind, asynchronous), timeout_s=60)


def waits_longer_than_the_group() -> None:
    group = world()
    store = dist.distributed_c10d._get_default_store()
    group.set_timeout(SHORT)
    if dist.get_rank() == 0:
        store.set("here", "")
        group.allreduce([torch.ones(3)], with_timeout(dist.AllreduceOptions(), LONG)).wait()
    else:
        store.wait(["here"])
        with pytest.raises(RuntimeError, match=r"[Tt]ime"):  # three times the group's timeout
            store.wait(["never"], 3 * SHORT)
        group.allreduce([torch.ones(3)], with_timeout(dist.AllreduceOptions(), LONG)).wait()
    group.set_timeout(LONG)
    dist.barrier()
    dist.destroy_process_group()


def test_a_call_may_wait_longer_than_its_group() -> None:
    launch(waits_longer_than_the_group, 2, timeout_s=60)


def waits_for_ages() -> None:
    group = world()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        store.set("here", "")
        work.wait(AGES)
    else:
        store.wait(["here"])
        with pytest.raises(RuntimeError, match=r"[Tt]ime"):
            store.wait(["never"], SHORT)
        dist.all_reduce(torch.ones(3))
    group.monitored_barrier(AGES)
    dist.destroy_process_group()


def test_a_timeout_may_be_ages() -> None:
    launch(waits_for_ages, 2, timeout_s=60)


def late_after_a_change(call: Callable[[], Any]) -> None:
    group = world()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    backend = group._get_backend(torch.device("cpu"))
    for wrong in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match=r"set_timeout: timeout is .* it must be more than 0"):
            group.set_timeout(wrong)
    backend._set_default_timeout(SHORT)
    assert backend.options._timeout == SHORT
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match=r"within 0\.3 s.*set_timeout"):
            call()
        store.set("late", "")
    else:
        store.wait(["late"])


def reduce_later() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()


def receive() -> None:
    dist.recv(torch.ones(3), 1)


def synchronous() -> None:
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("call", [synchronous, reduce_later, receive])
def test_a_group_keeps_to_a_timeout_that_is_set_later(call: Callable[[], Any]) -> None:
    launch(late_after_a_change, 2, (call,), timeout_s=60)


def wrong_timeouts() -> None:
    group = world()
    for wrong in (timedelta(0), timedelta(seconds=-3)):
        with pytest.raises(ValueError, match=r"all_reduce: timeout is (0|-3000) ms; it must be"):
            group.allreduce([torch.ones(1)], with_timeout(dist.AllreduceOptions(), wrong))
        with pytest.raises(ValueError, match=r"'shardcomm': timeout is .* it must be more than 0"):
            dist.new_group(timeout=wrong)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_a_timeout_of_nothing_is_refused() -> None:
    launch(wrong_timeouts, 2, timeout_s=60)


def late_between_hosts(change: bool) -> None:
    """Ranks 2 and 3 do not come: those of the other host wait for Gloo, and not for shared memory."""
    group = world("AABB")
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    options = dist.AllreduceOptions()
    options.asyncOp = False
    if change:
        group.set_timeout(SHORT)
    else:
        options.timeout = SHORT
    if dist.get_rank() < 2:
        with pytest.raises(CommError, match=r"within 0\.3 s|lost the ranks of other hosts"):
            group.allreduce([torch.ones(3)], options)
        store.add("late", 1)
        if dist.get_rank() == 0:
            while store.add("late", 0) < 2:
                pass
            store.set("all are late", "")
    else:
        store.wait(["all are late"])


@pytest.mark.parametrize("change", [False, True])
def test_ranks_of_several_hosts_keep_to_timeouts(change: bool) -> None:
    launch(late_between_hosts, 4, (change,), timeout_s=60)


def waits_longer_between_hosts() -> None:
    group = world("AABB")
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    group.set_timeout(SHORT)
    options = with_timeout(dist.AllreduceOptions(), LONG)
    if dist.get_rank() > 1:
        with pytest.raises(RuntimeError, match=r"[Tt]ime"):  # three times the group's timeout
            store.wait(["never"], 3 * SHORT)
    x = torch.ones(3)
    group.allreduce([x], options).wait()
    assert x.tolist() == [4, 4, 4]
    group.set_timeout(LONG)
    dist.barrier()
    dist.destroy_process_group()


def test_a_call_between_hosts_may_wait_longer_than_its_group() -> None:
    launch(waits_longer_between_hosts, 4, timeout_s=60)
