"""Collectives of a torch that asks no tensor for its `__torch_function__`, as 2.11, are made to ask."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardcomm import Communicator, fully_shard
from shardcomm.parameter import collectives
from support.thread_ranks import run_threads


def unasking(name: str) -> tuple[list[object], object]:
    """A function of torch's by its name that notes what it takes, and asks nothing; and the notes."""
    taken: list[object] = []

    def function(*args: object, **_kwargs: object) -> None:
        taken.append(args)

    function.__name__ = name
    function.__module__ = dist.broadcast.__module__
    assert not collectives.asks(function)
    return taken, collectives.asking(function)


@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_rows_are_refused(name: str) -> None:
    def body(comm: Communicator) -> None:
        net = nn.Linear(8, 8)
        fully_shard(net, comm)
        taken, collective = unasking(name)
        for rows in (net.weight, net.weight.data, net.weight.detach() * 2):
            for args, kwargs in [((rows, 0), {}), ((), {"tensor": rows}), ((None, [rows]), {})]:
                with pytest.raises(RuntimeError, match=rf"^{name} of 'weight', of which each rank"):
                    collective(*args, **kwargs)  # type: ignore[operator]
        assert taken == []
        plain = torch.ones(3)
        collective(plain, 0)  # type: ignore[operator]
        assert taken == [(plain, 0)]

    run_threads(body, 2)


def test_after_install_torchs_collectives_ask() -> None:
    collectives.install()
    for name in ("broadcast", "reduce", "gather", "scatter", "send", "recv"):
        function = getattr(dist, name)
        assert function is getattr(dist.distributed_c10d, name)
        assert collectives.asks(function) or function.__code__.co_name == "call"


def test_what_somebody_has_put_in_a_collectives_place_stays() -> None:
    assert collectives.asks(functools.partial(dist.broadcast, src=0))
