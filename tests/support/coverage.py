"""Which features the tests cover, with which strategies and over which transports: docs/coverage.md.

A test says which features it is about, and the rest is read from it::

    @pytest.mark.covers("gradient clipping", "tensor parallel")
    @pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
    def test_norms(strategy: str) -> None:  # calls run_threads: covers both strategies over `local`

Strategies and transports are those among a case's parameters, or else those written in the code of the test and of the
tests' functions that it calls. A strategy that is not written is fully_shard's default; a transport, `local` for ranks
that are threads and `shm` for processes. Where that would be wrong, the mark has ``strategies=`` or ``transports=``.
Cases of one rank do not count.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.reached_code import constants, names, reached

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"]
TRANSPORTS = ["local", "shm", "hosts", "c10d", "nccl", "local:cuda"]
PLAYED = "nccl (played)"

ENGINE = {
    "training parity": "parameters end up where one process, or torch's DDP, takes them",
    "gradient accumulation": "`no_sync`, several backwards, all-reduces that are put off",
    "mixed precision": "`MixedPrecision`, parameters of several dtypes",
    "block formats": "`MixedPrecision(gather_format=...)`",
    "gradient clipping": "norms are those of the whole model",
    "loss scaling, NaN and Inf": "`GradScaler`, torch's scaler, `on_nonfinite`",
    "prefetch and slots": "any depth and number gives the same results",
    "granularity": "rows, elements, whole tensors",
    "shard_dim": "rows along any dim",
    "owners": "whole parameters on one rank each, balanced over the model",
    "reshard_after_forward": "backward gathers inside a host",
    "CPU offload": "shards, gradients and optimizer state in host memory",
    "activation checkpointing": "units that are computed again",
    "torch.compile": "compiled units",
    "odd forwards": "units that are skipped, repeated, nested, or called by themselves",
    "tensor parallel": "DTensors of `parallelize_module` inside",
    "expert meshes": "units over some of the ranks",
    "units that differ": "a `Policy` for each",
    "ignored parameters": "`ignored_params`",
    "frozen and tied parameters": "frozen, thawed, unused, shared between modules",
    "meta device": "models that are materialised by `fully_shard`",
    "gathered and unshard": "full parameters outside of a forward",
    "forward methods": "`register_forward_method`",
    "torch.func": "transforms, double backward, gradients of inputs",
    "state dicts": "`state_dict`, `full_state_dict` and their loading",
    "checkpoints": "`Checkpoints` and torch.distributed.checkpoint",
    "optimizer state": "saved, loaded, and moved between layouts",
    "optimizers": "torch's and `AdamW` on rows and on whole parameters",
    "averages of parameters": "`ExponentialMovingAverage`",
    "changed parameters": "a backward of parameters that were written to since",
    "exceptions": "in forward, backward, hooks",
    "ranks that differ": "models and arguments that are not the same on all ranks",
    "failed ranks": "a rank that dies, aborts or skips a unit while it trains",
    "memory as planned": "`MemoryPlan` against what the engine holds",
    "tracing": "spans of units, timelines of all ranks",
}
"""What the engine does; the text says what is compared, or what belongs to it."""

WITHOUT_ENGINE = {
    "collectives": "random operations, sizes and dtypes against torch's arithmetic",
    "uneven parts": "`counts=`",
    "sums in fp32": "halves are summed in fp32 and rounded once",
    "NaN and Inf flags": "`nonfinite=`",
    "streams and lifetimes": "queued work, its operands, its waits",
    "buckets": "`Bucket` by hand",
    "receipts": "the path that was taken, and why",
    "names of calls": "`tag` in errors",
    "what ranks are in": "`pending`",
    "set-up that fails": "ranks that do not come, die or disagree before there is a group",
    "dead rank": "its death is told by all others",
    "late rank": "told at the deadline",
    "different calls": "told with every rank's call",
    "ranks that wait for each other": "told at once",
    "abort and close": "reach all ranks",
    "forks": "a child is not its parent's rank",
    "checkpoint folders": "the newest whole one survives whatever happens to the next",
    "torch.distributed backend": "collectives of torch through ours",
    "drop-in collectives": "`all_gather_into_tensor`, `reduce_scatter_tensor`",
    "FSDP2 attached": "torch's fully_shard with our communication",
}
"""What is done without an engine, and so without a strategy."""


class Covered(NamedTuple):
    """One thing that one test covers; `strategy` is "" where there is none."""

    feature: str
    strategy: str
    transport: str
    file: str


def covered(items: Iterable[pytest.Item]) -> set[Covered]:
    """What the marks of `items` amount to."""
    return {each for item in items for each in _covered_by(item)}


def page(everything: set[Covered]) -> str:
    """docs/coverage.md."""
    return "\n".join(_page(everything)) + "\n"


def _covered_by(item: pytest.Item) -> Iterator[Covered]:
    for mark in item.iter_markers("covers"):
        unknown = set(mark.args) - {*ENGINE, *WITHOUT_ENGINE}
        if unknown or not mark.args:
            raise pytest.UsageError(
                f"{item.nodeid}: covers is of {sorted(unknown)}; accepted: what support.coverage lists"
            )
        if _ranks(_parameters(item)) == 1:
            return
        file = item.path.relative_to(item.config.rootpath).as_posix()
        transports = mark.kwargs.get("transports") or _transports(item)
        if unlisted := set(transports) - {*TRANSPORTS, PLAYED}:
            raise pytest.UsageError(
                f"{item.nodeid}: covers has transports {sorted(unlisted)}; accepted: {[*TRANSPORTS, PLAYED]}"
            )
        for feature in mark.args:
            strategies = {""}
            if feature in ENGINE:
                strategies = mark.kwargs.get("strategies") or _strategies(item)
            for strategy in strategies:
                for transport in transports:
                    yield Covered(feature, strategy, transport, file)


def _ranks(parameters: Mapping[str, Any]) -> int | None:
    shards = parameters.get("ranks", parameters.get("shards"))
    replicas = parameters.get("replicas", 1)
    both_are_numbers = isinstance(shards, int) and isinstance(replicas, int)
    return shards * replicas if both_are_numbers else None


def _strategies(item: pytest.Item) -> set[str]:
    return _given(item, STRATEGIES) or {STRATEGIES[0]}


def _transports(item: pytest.Item) -> set[str]:
    named = {name for each in _functions(item) for name in names(each.__code__)}
    starts_processes = not named.isdisjoint({"launch", "processes", "get_context"}) or any(
        each.__globals__.get(name) is subprocess
        for each in _functions(item)
        for name in names(each.__code__)
    )
    if item.get_closest_marker("gpu"):
        return {"nccl" if starts_processes else "local:cuda"}
    given = _given(item, ["local", "shm", "c10d"])
    if given:
        return given
    return {"shm" if starts_processes else "local"}


def _given(item: pytest.Item, words: Iterable[str]) -> set[str]:
    """Those of `words` that a case's parameters have in them, or else those that its code has."""
    parameters = _parameters(item)
    functions = _functions(item)
    values = [parameters]
    for each in functions:  # of parameters that are keys of a table
        tables = [each.__globals__.get(name) for name in set(names(each.__code__))]
        keys = [value for value in parameters.values() if isinstance(value, str)]
        values += [
            table[key]
            for table in tables
            if isinstance(table, dict)
            for key in keys
            if key in table
        ]
    found = set(words) & set(_strings(values))
    return found or set(words) & set(
        _strings([constant for each in functions for constant in constants(each.__code__)])
    )


def _functions(item: pytest.Item) -> list[Any]:
    own = [getattr(item, "function", None), *_parameters(item).values()]
    return [each for function in own for each in reached(function)]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    call = getattr(item, "callspec", None)
    return call.params if call is not None else {}


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _strings(each)


def _page(everything: set[Covered]) -> Iterator[str]:
    yield "# What the tests cover"
    yield ""
    yield "Which features the tests cover, with which strategies and over which transports. An entry says that a"
    yield "test of two or more ranks checks the feature there. It does not say that features are tested in all"
    yield "combinations with each other. `python -m pytest --collect-only -q --coverage-table=docs/coverage.md`"
    yield "writes this page, from the marks of the tests and from what they call; a test checks that the page is"
    yield "what the command writes."
    yield ""
    yield "| transport | its ranks are |"
    yield "|---|---|"
    yield "| local | threads of one process, on a CPU |"
    yield "| shm | processes of one host that share memory |"
    yield "| hosts | processes of several hosts, which network namespaces of one machine play |"
    yield "| c10d | processes that talk through Gloo |"
    yield "| local:cuda | threads on one GPU; these tests are skipped where there is none |"
    yield "| nccl | processes with a GPU each; these tests are skipped where there is none |"
    yield f"| {PLAYED} | processes over a CUDA runtime and an NCCL that the tests play, without a GPU |"
    yield ""
    yield "The core's own tests in `tests/cpp/`, which cover all transports in C++, are not in these tables."
    yield ""
    yield "## The engine"
    yield ""
    yield f"| feature | {' | '.join(STRATEGIES)} |"
    yield f"|---|{'---|' * len(STRATEGIES)}"
    for feature, meaning in ENGINE.items():
        cells = [_cell(everything, feature, strategy) for strategy in STRATEGIES]
        yield f"| **{feature}**: {meaning} | {' | '.join(cells)} |"
    yield ""
    yield "## Without an engine"
    yield ""
    yield "| feature | transports |"
    yield "|---|---|"
    for feature, meaning in WITHOUT_ENGINE.items():
        yield f"| **{feature}**: {meaning} | {_cell(everything, feature, '')} |"
    yield ""
    yield "## Where these tests are"
    yield ""
    yield "| feature | files |"
    yield "|---|---|"
    files = defaultdict(set)
    for each in everything:
        files[each.feature].add(f"`{each.file}`")
    for feature in (*ENGINE, *WITHOUT_ENGINE):
        yield f"| {feature} | {', '.join(sorted(files[feature])) or '-'} |"


def _cell(everything: set[Covered], feature: str, strategy: str) -> str:
    over = {
        each.transport
        for each in everything
        if (each.feature, each.strategy) == (feature, strategy)
    }
    return ", ".join(t for t in (*TRANSPORTS, PLAYED) if t in over) or "-"


def write(items: Iterable[pytest.Item], file: Path) -> None:
    """The page of `items`."""
    file.write_text(page(covered(items)))
