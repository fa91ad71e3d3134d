"""The self-test: every usable transport and the copies, against torch's own arithmetic, in processes of their own.

Collectives move and add random whole numbers, whose sums are exact: a result is right to the last bit or wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any, NamedTuple, cast

import torch

from shardcomm._C import CommError, cuda_status
from shardcomm.cli.exact_values import count_wrong, values
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.words import Transport, Use
from shardcomm.copy.plan import CopyPlan
from shardcomm.process.launch import RankError, launch
from shardcomm.stream.streams import start_stream

RANKS = 2
DEADLINE_S = 60.0
"""The limit of the whole self-test."""

_COLLECTIVE_DEADLINE_S = 10.0
_COUNT = 300_001  # elements of a rank: in float32 more than the staging area holds at once
_SEED = 5


class Path(NamedTuple):
    """The path of a collective, from its receipt. `memory`: its buffer's, "allocate" (Communicator's) or "ordinary"."""

    operation: str
    memory: str
    taken: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: sentences about errors, sentences that follow from another rank's error, and paths."""

    errors: list[str] = field(default_factory=list)
    following: list[str] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)


def self_test(transports: list[str]) -> list[dict[str, Any]]:
    """Tests these transports (see `findings`) and the copies, one after the other.

    It never raises for a test that fails, and ends soon after DEADLINE_S.

    Returns:
        For each test its `name`, `seconds` (the first one's include the start of Python), `errors` and `paths` (each a
        Path as a dict).
    """
    end = time.monotonic() + DEADLINE_S
    tests = [_test("copies", end, copies, 1, "cpu")]
    if "local:cuda" in transports:
        tests.append(_test("copies:cuda", end, copies, 1, "cuda"))
    for name in transports:
        if name.startswith("local"):
            device = name.partition(":")[2] or "cpu"
            tests.append(_test(name, end, between_threads, 1, device))
        elif name == "nccl" and cuda_status().devices < RANKS:
            continue  # a GPU has one rank
        else:
            tests.append(_test(name, end, between_processes, RANKS, name))
    return tests


def _test(
    name: str, end: float, fn: Callable[[str], Outcome], ranks: int, argument: str
) -> dict[str, Any]:
    start = time.monotonic()
    try:
        outcome = _together(launch(fn, ranks, (argument,), timeout_s=max(0.1, end - start)))
    except (RankError, TimeoutError) as error:
        outcome = Outcome([str(error)])
    return {
        "name": name,
        "seconds": time.monotonic() - start,
        "errors": outcome.errors,
        "paths": [path._asdict() for path in outcome.paths],
    }


def _together(outcomes: list[Outcome]) -> Outcome:
    """All ranks' errors, with those that follow from another rank's at the end, and rank 0's paths."""
    errors = [error for outcome in outcomes for error in outcome.errors]
    following = [error for outcome in outcomes for error in outcome.following]
    return Outcome(errors + following, paths=outcomes[0].paths)


def between_processes(name: str) -> Outcome:
    """Tests transport `name`, of which this process is one rank."""
    transport = cast(Transport, name.partition(":")[0])
    device = "cuda" if transport == "nccl" else "cpu"
    with Communicator.from_env(
        deadline_s=_COLLECTIVE_DEADLINE_S, transport=transport, device=device
    ) as comm:
        return collectives(comm)


def between_threads(device: str) -> Outcome:
    """Tests `local` on `device`: this process has all ranks, as threads."""
    group = Communicator.local_group(RANKS, deadline_s=_COLLECTIVE_DEADLINE_S, device=device)
    started = (group[0].device,)
    with ThreadPoolExecutor(RANKS, initializer=start_stream, initargs=started) as threads:
        return _together(list(threads.map(collectives, group)))


def collectives(comm: Communicator) -> Outcome:
    """Runs each collective on this rank, in both kinds of memory.

    It never raises. After an error it aborts the group, so that the other ranks fail, too.
    """
    outcome = Outcome()
    try:
        for memory, dtype in product(("allocate", "ordinary"), (torch.bfloat16, torch.float32)):
            _collectives(comm, memory, dtype, outcome)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        comm.abort(reason)
        follows = isinstance(error, CommError)
        (outcome.following if follows else outcome.errors).append(f"rank {comm.rank}: {reason}")
    return outcome


def _collectives(comm: Communicator, memory: str, dtype: torch.dtype, outcome: Outcome) -> None:
    numel = comm.size * _COUNT
    sent = [values(numel, dtype, rank, _SEED, terms=comm.size) for rank in range(comm.size)]
    total = torch.stack(sent).sum(0, dtype=dtype)
    mine = sent[comm.rank].to(comm.device)

    def buffer(use: Use) -> torch.Tensor:
        if memory == "allocate":
            return comm.allocate(numel, dtype=dtype, use=use)
        return torch.zeros(numel, dtype=dtype, device=comm.device)

    def check(operation: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        if wrong := count_wrong(result, expected):
            outcome.errors.append(
                f"rank {comm.rank}: {operation} of {dtype} in {memory} memory: {wrong} of {len(expected)} elements "
                "are wrong"
            )
        receipt = next(each for each in comm.receipts() if each.operation == operation)
        path = Path(operation, memory, receipt.taken, receipt.reason)
        if path not in outcome.paths:
            outcome.paths.append(path)

    gathered = buffer("gather")
    comm.all_gather(gathered, mine[:_COUNT])
    check("all_gather", gathered, torch.cat([each[:_COUNT] for each in sent]))

    both = buffer("reduce").copy_(mine)
    reduced = torch.zeros(_COUNT, dtype=dtype, device=comm.device)
    comm.reduce_scatter(reduced, both)
    check("reduce_scatter", reduced, total.view(comm.size, _COUNT)[comm.rank])

    comm.all_reduce(both)
    check("all_reduce", both, total)

    last = comm.size - 1
    both.copy_(mine)
    comm.broadcast(both, root=last)
    check("broadcast", both, sent[last])


def copies(device: str) -> Outcome:
    """Compares a CopyPlan that packs, and one that unpacks, scales and adds, with torch, bit for bit."""
    random = torch.Generator().manual_seed(_SEED)
    sizes = torch.randint(1, 10_000, (200,), generator=random).tolist()
    offsets = list(accumulate(sizes, initial=0))[:-1]
    tensors = [torch.randn(size, generator=random) for size in sizes]
    rounded = torch.cat(tensors).bfloat16()

    packed = torch.zeros(sum(sizes), dtype=torch.bfloat16, device=device)
    plan = CopyPlan.pack(sizes, offsets, torch.float32, torch.bfloat16)
    plan.run([tensor.to(device) for tensor in tensors], [packed])

    unpacked = [torch.ones(size, device=device) for size in sizes]
    plan = CopyPlan.unpack(sizes, offsets, torch.bfloat16, torch.float32)
    plan.run([packed], unpacked, scale=0.5, accumulate=True)

    results = {
        "pack from float32 to bfloat16": (packed, rounded),
        "unpack to float32, scaled and added": (torch.cat(unpacked), 1 + rounded.float() / 2),
    }
    return Outcome(
        [
            f"{what} on {device}: {wrong} of {len(expected)} elements are wrong"
            for what, (result, expected) in results.items()
            if (wrong := count_wrong(result, expected))
        ]
    )
