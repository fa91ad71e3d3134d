"""Measures the machine that a simulation needs: how fast its ranks compute, copy and communicate over shared memory.

Each figure is of all ranks at work at once, as many as there are cores, and of the slowest of them.

    flops_per_s, unit_s   a GPT without communication, of several widths and tokens: what two blocks more take.
                          forward = unit_s + operations / flops_per_s; backward is so many times as long
    crowding              a GPT's time on two ranks a core, over twice its time on one rank a core, in turns
    copy_bytes_per_s      copies from buffer to buffer
    code_bytes_per_s      the same through "mxint8": float32 elements encoded, and decoded again
    host_bytes_per_s      gathers, reduces and all-reduces: bytes read and written in a second
    host_latency_s        a GPT under full_shard: what it takes longer than on one rank, for each meeting of its ranks

Buffers take turns, so that none is in a cache, as in a step of training.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
import torch.nn.functional as F

from shardcomm.cli.bench.fit import Fit, fit
from shardcomm.comm.communicator import Communicator
from shardcomm.copy.blocks import BlockFormat, BlockSegment, decode, encode
from shardcomm.copy.wire_stats import WireStats
from shardcomm.engine.sharding import fully_shard
from shardcomm.models.gpt import GPT, VOCAB
from shardcomm.planner.planner import MemoryPlan
from shardcomm.process.launch import launch
from shardcomm.simulate.collectives import (
    MEETINGS,
    moved_by_all_reduce,
    moved_by_gather,
    moved_by_reduce,
)
from shardcomm.simulate.machine import Machine
from shardcomm.simulate.simulation import Simulation
from shardcomm.simulate.unit_times import times_by_flops, unit_flops

_CONTEXT = 128
_STEPS, _WARM_UP, _ROUNDS = 11, 1, 2
_ATTEMPTS, _GOOD = 3, 0.05  # the error of a block that is not measured again
_SIZES = tuple(1 << power for power in (20, 21, 22, 23, 24))
_CACHES = 1 << 26  # bytes of buffers that take turns


class _Case(NamedTuple):
    """A GPT whose steps are timed, on each rank alone or sharded over all."""

    width: int
    layers: int
    sequences: int
    sharded: bool = False

    def made(self) -> GPT:
        return GPT(self.width, self.layers, _CONTEXT)

    @property
    def tokens(self) -> int:
        return self.sequences * _CONTEXT

    @property
    def attention(self) -> int:
        return 2 * _CONTEXT * self.width


_FEW, _MORE = 1, 3  # blocks
_SHAPES = ((128, 2), (256, 1), (256, 4), (512, 2))  # width, sequences
_ALONE = [_Case(w, layers, count) for w, count in _SHAPES for layers in (_FEW, _MORE)]
_CROWDED = _Case(256, 3, 4)  # one of those
_SHARDED = [_Case(128, 8, 2, True), _Case(256, 4, 2, True)]  # units so small that meetings count
_WHOLE = [case._replace(sharded=False) for case in _SHARDED]  # each on a rank alone


class _StepTime(NamedTuple):
    """The seconds of a forward and a backward on the slowest rank."""

    forward_s: float
    backward_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s


class _Measured(NamedTuple):
    """What the ranks have measured: `moves` has points of bytes and seconds."""

    steps: dict[_Case, list[_StepTime]]  # of each round
    copy_bytes_per_s: float
    code_bytes_per_s: float
    moves: list[tuple[int, float]]
    crowding: float


def measured_machine(name: str) -> Machine:
    """Measures this machine; takes half a minute, and up to a minute and a half where something disturbs it.

    Raises:
        RankError: A rank failed.
    """
    cores = len(os.sched_getaffinity(0))
    ranks = max(cores, 2)
    apart, blocks, of_blocks = _blocks_apart(ranks)
    crowded = launch(_measure, 2 * ranks, ([],))[0]
    ratios = [time.backward_s / time.forward_s for _, time in blocks]
    of_memory = fit([*apart.moves, *crowded.moves])
    assert of_memory is not None
    here = "measured by `shardcomm bench --fit`"
    machine = Machine(
        name=name,
        origin="measured",
        transport="shm",
        ranks_per_host=2 * ranks,
        cores=cores,
        flops_per_s=1 / of_blocks.beta_s,
        unit_s=of_blocks.alpha_s,
        backward=statistics.median(ratios),
        crowding=crowded.crowding,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (2 * ranks),
        copy_bytes_per_s=apart.copy_bytes_per_s,
        code_bytes_per_s=apart.code_bytes_per_s,
        host_latency_s=0.0,
        host_bytes_per_s=1 / of_memory.beta_s,
        network_latency_s=0.0,
        network_bytes_per_s=0.0,
        network_burst_bytes=0,
        socket_bytes_per_s=0.0,
        turn_s=0.0,
        contention=0.0,
        sources={
            "ranks_per_host": "as many as were measured together: two for each core",
            "cores": "the cores that this process may use",
            "flops_per_s": f"{here}: blocks of a GPT; worst error {of_blocks.worst_error:.1%}",
            "unit_s": f"{here}: blocks of a GPT",
            "backward": f"{here}: the median of {', '.join(f'{ratio:.2f}' for ratio in ratios)}",
            "crowding": f"{here}: a GPT on {2 * ranks} ranks and on {ranks}",
            "memory_bytes": "the host's memory by its ranks",
            "copy_bytes_per_s": f"{here}: copies",
            "code_bytes_per_s": f"{here}: float32 to mxint8 and back",
            "host_latency_s": f"{here}: a GPT under full_shard on {ranks} ranks",
            "host_bytes_per_s": f"{here}: collectives on {ranks} and {2 * ranks} ranks; root mean "
            f"square error {of_memory.rms_error:.1%}",
            "network_latency_s": "there is one host",
            "network_bytes_per_s": "there is one host",
            "network_burst_bytes": "there is one host",
            "socket_bytes_per_s": "there is one host",
            "turn_s": "there is one host",
            "contention": "ranks share cores instead",
        },
    )
    return replace(machine, host_latency_s=_latency_s(apart.steps, machine, ranks))


def _blocks_apart(ranks: int) -> tuple[_Measured, list[tuple[int, _StepTime]], Fit]:
    """What the ranks measure, their blocks, and the line through those.

    If a block is far from the line, something else ran meanwhile: all is measured again, and the best line taken.
    """
    attempts = []
    for _ in range(_ATTEMPTS):
        apart = launch(_measure, ranks, ([*_ALONE, *_SHARDED, *_WHOLE],))[0]
        blocks = [_block(apart, width, count) for width, count in _SHAPES]
        line = fit([(flops, time.forward_s) for flops, time in blocks])
        assert line is not None
        attempts.append((apart, blocks, line))
        if line.worst_error <= _GOOD:
            break
    return min(attempts, key=lambda attempt: attempt[2].worst_error)


def _block(measured: _Measured, width: int, sequences: int) -> tuple[int, _StepTime]:
    """A block's operations in its forward, and its times: a GPT's, less those of one with fewer blocks."""
    few, more = (_Case(width, layers, sequences) for layers in (_FEW, _MORE))
    with torch.device("meta"):
        model = few.made()
    pack_s = 2 * 4 * sum(p.numel() for p in model.blocks.parameters()) / measured.copy_bytes_per_s
    flops = unit_flops(model, tokens=few.tokens, attention=few.attention)[1]
    # Of a round's steps, which a neighbour of this machine slows alike.
    longer = [
        _StepTime(all_.forward_s - less.forward_s, all_.backward_s - less.backward_s)
        for less, all_ in zip(measured.steps[few], measured.steps[more], strict=True)
    ]
    blocks = _MORE - _FEW
    forward_s = statistics.median(each.forward_s for each in longer) / blocks
    backward_s = statistics.median(each.backward_s for each in longer) / blocks - pack_s
    return flops, _StepTime(forward_s, backward_s)


def _latency_s(steps: dict[_Case, list[_StepTime]], machine: Machine, ranks: int) -> float:
    """What a step takes longer on `ranks` ranks than on one, beyond what `machine` says, for each meeting.

    The latency of `machine` is 0.
    """
    longer_s, meetings = 0.0, 0
    for sharded, whole in zip(_SHARDED, _WHOLE, strict=True):
        with torch.device("meta"):
            model = sharded.made()
        times = times_by_flops(model, machine, tokens=sharded.tokens, attention=sharded.attention)
        together, alone = (
            Simulation.of(MemoryPlan.of(model, count), times, machine) for count in (ranks, 1)
        )
        longer_s += statistics.median(
            its.step_s - other.step_s
            for its, other in zip(steps[sharded], steps[whole], strict=True)
        )
        longer_s -= together.step_s - alone.step_s
        meetings += sum(MEETINGS.get(span.row, 0) for span in together.spans)
    return max(0.0, longer_s / meetings)


def _measure(cases: list[_Case]) -> _Measured:
    """What a rank measures; all ranks at once."""
    torch.set_num_threads(1)
    with Communicator.from_env() as comm:
        steps = _step_times(comm, cases)
        few = max(2, len(os.sched_getaffinity(0)))
        slower = crowding(comm, comm.rank, few=few, all_=comm.size)
        return _Measured(steps, _copies(comm), _codes(comm), list(_moves(comm)), slower)


def crowding(comm: Communicator, index: int, *, few: int, all_: int) -> float:
    """How many times as long as its turns a rank takes where `all_` ranks of a machine compute, not `few`; collective.

    The two take turns, so that whatever else the machine does hits both alike.

    Args:
        comm: All ranks.
        index: The rank's number among those of its machine.
        few: As many as the machine has cores.
        all_: How many ranks the machine has.
    """
    if all_ <= few:
        return 1.0
    with ExitStack() as engines:
        step = _step_of(comm, _CROWDED, engines)
        seconds: dict[int, list[float]] = {few: [], all_: []}
        for round_ in range(_WARM_UP + _STEPS):
            for computing, times in seconds.items():
                _, step_s = step(index < computing).tolist()
                if round_ >= _WARM_UP:
                    times.append(step_s)
    ratio = statistics.median(seconds[all_]) / statistics.median(seconds[few])
    return max(1.0, ratio * few / all_)


def _step_times(comm: Communicator, cases: list[_Case]) -> dict[_Case, list[_StepTime]]:
    """Of each case all rounds. Cases take turns, so that whatever else the machine does hits all of them alike."""
    with ExitStack() as engines:
        steps = {case: _step_of(comm, case, engines) for case in cases}
        times: dict[_Case, list[_StepTime]] = {case: [] for case in cases}
        for round_ in range(_WARM_UP + _STEPS):
            for case, step in steps.items():
                forward_s, step_s = step(True).tolist()
                if round_ >= _WARM_UP:
                    times[case].append(_StepTime(forward_s, step_s - forward_s))
    return times


def _step_of(comm: Communicator, case: _Case, engines: ExitStack) -> Callable[[bool], torch.Tensor]:
    """A step, which returns the seconds of its forward and of all of it, on the slowest rank of those that make it."""
    torch.manual_seed(comm.rank)
    model = case.made()
    tokens = torch.randint(0, VOCAB, (case.sequences, _CONTEXT + 1))
    engine = fully_shard(model, comm if case.sharded else Communicator.local_group(1)[0])
    engines.callback(engine.close)

    def step(made: bool) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        comm.barrier()
        slowest = torch.zeros(2)
        if made:
            begin = time.perf_counter()
            logits = model(tokens[:, :-1])
            between = time.perf_counter()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            slowest = torch.tensor([between - begin, time.perf_counter() - begin])
        comm.all_reduce(slowest, "max")
        return slowest

    return step


def _copies(comm: Communicator) -> float:
    """Bytes that a rank reads and writes in a second."""
    size = _SIZES[-1]
    pairs = [(torch.ones(size // 4), torch.ones(size // 4)) for _ in range(_CACHES // size)]
    seconds = _timed(comm, [lambda a=a, b=b: a.copy_(b) for a, b in pairs])  # type: ignore[misc]
    return 2 * size / seconds


def _codes(comm: Communicator) -> float:
    """Bytes that a rank reads and writes in a second where it encodes, and where it decodes."""
    numel = _SIZES[-1] // 4
    code = BlockFormat("mxint8")
    buffers = [torch.ones(numel) for _ in range(_CACHES // _SIZES[-1])]
    wire = comm.allocate(code.nbytes(numel), dtype=torch.uint8, use="reduce")
    stats = WireStats()

    def there_and_back(buffer: torch.Tensor) -> None:
        whole = [BlockSegment(buffer, 0)]
        encode(code, whole, wire, stats=stats)
        decode(code, wire, whole)

    seconds = _timed(comm, [partial(there_and_back, buffer) for buffer in buffers])
    return 2 * (4 * numel + wire.nbytes) / seconds


def _moves(comm: Communicator) -> Iterator[tuple[int, float]]:
    """For each collective the bytes that a rank reads and writes, and the seconds that it has for that.

    The bytes are those that the simulation counts. Ranks that share a core have it in turn.
    """
    turns = max(1.0, comm.size / len(os.sched_getaffinity(0)))
    for size in _SIZES:
        part = size / comm.size
        moved = {
            "gather": moved_by_gather(part, part),
            "reduce": moved_by_reduce(size, part),
            "all_reduce": moved_by_all_reduce(size, comm.size),
        }
        for what, calls in _calls(comm, size // 4):
            yield round(turns * moved[what]), _timed(comm, calls)


def _calls(comm: Communicator, numel: int) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """For each operation its calls, on buffers of their own."""
    count = min(16, _CACHES // (4 * numel))
    parts = [torch.ones(numel // comm.size) for _ in range(count)]
    windows = [comm.allocate(numel, use="gather") for _ in range(count)]
    yield (
        "gather",
        [
            lambda window=window, part=part: comm.all_gather(window, part)  # type: ignore[misc]
            for window, part in zip(windows, parts, strict=True)
        ],
    )
    sent = [comm.allocate(numel, use="reduce").fill_(1) for _ in range(count)]
    yield (
        "reduce",
        [
            lambda part=part, each=each: comm.reduce_scatter(part, each, "avg")  # type: ignore[misc]
            for part, each in zip(parts, sent, strict=True)
        ],
    )
    yield (
        "all_reduce",
        [
            lambda each=each: comm.all_reduce(each, "avg")  # type: ignore[misc]
            for each in sent
        ],
    )


def _timed(comm: Communicator, calls: list[Callable[[], object]]) -> float:
    """Seconds of a call, of the rounds' median."""
    taking_turns = cycle(calls)
    many = max(len(calls), 8)
    rounds = []
    for _ in range(_ROUNDS + 1):
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(many):
            next(taking_turns)()
        rounds.append((time.perf_counter() - begin) / many)
    return statistics.median(rounds[1:])
