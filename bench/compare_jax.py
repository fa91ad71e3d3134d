"""Collectives inside `jax.jit`, and a sharded training step: shardcomm.jax against JAX's own CPU collectives (Gloo).

Both run in the same processes, each a rank with one CPU device: shardcomm's in a program of this device, JAX's in a
program of all ranks' devices (`shard_map` with `jax.lax.all_gather`, `psum_scatter` and `psum`, and
`jax_cpu_collectives_implementation` "gloo"). float32; sizes are total bytes. The step is that of examples/jax_fsdp.py,
in which the collective that gathers a layer is all that differs. A time is the slowest rank's, from a common start;
medians over rounds in which the peers take turns, and the quartiles of the rounds' ratios. Results are checked. Without
JAX it says so and ends.
"""

from __future__ import annotations

import runpy
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Bound, Report, Times, arguments

import shardcomm

try:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import shardcomm.jax
except ModuleNotFoundError as error:
    print(f"skipped: needs {error.name}: pip install jax", file=sys.stderr)
    sys.exit()

EXAMPLE = Path(__file__).parents[1] / "examples/jax_fsdp.py"
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
RANKS = (2, 4)
ROUNDS = 21

Timings = dict[str, list[float]]  # "what/size/peer" -> seconds of each round


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def rank_main(port: int) -> Timings:
    torch.set_num_threads(1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with shardcomm.Communicator.from_env() as comm:
        jax.distributed.initialize(f"127.0.0.1:{port}", comm.size, comm.rank)
        timings: Timings = {}
        with shardcomm.jax.XlaCommunicator(comm) as ours:
            for size in SIZES:
                take_turns(comm, collectives(ours, size), str(size), timings)
            take_turns(comm, steps(ours), "", timings)
        jax.distributed.shutdown()
    return timings


def take_turns(
    comm: shardcomm.Communicator, runs: dict[str, Callable[[], Any]], size: str, timings: Timings
) -> None:
    inner = 10 if size == str(SIZES[0]) else 1
    for _ in range(ROUNDS):
        for name, run in runs.items():
            what, peer = name.split("/")
            comm.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                jax.block_until_ready(run())
            seconds = torch.tensor((time.perf_counter() - start) / inner, dtype=torch.float64)
            comm.all_reduce(seconds, "max")
            timings.setdefault(f"{what}/{size}/{peer}", []).append(float(seconds))


def over_gloo(fn: Callable[..., Any], out_is_whole: bool) -> tuple[Callable[..., Any], Any]:
    """`fn` of this rank's part as a program of all ranks' devices, and how a rank's part is put into its input."""
    mesh = jax.make_mesh((jax.device_count(),), ("ranks",))
    parts = PartitionSpec("ranks")
    out = PartitionSpec() if out_is_whole else parts
    program = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=parts, out_specs=out, check_vma=False))
    return program, partial(jax.make_array_from_process_local_data, NamedSharding(mesh, parts))


def collectives(comm: Any, size: int) -> dict[str, Callable[[], Any]]:
    """What takes turns, by "what/peer"; each has run once, and its result was checked."""

    numel = size // 4
    everybody = np.random.default_rng(0).integers(-99, 99, (comm.size, numel)).astype(np.float32)
    part = numel // comm.size
    own = slice(comm.rank * part, (comm.rank + 1) * part)
    mine, shard = everybody[comm.rank], everybody[comm.rank][own]
    lax = jax.lax
    cases = {
        "all_gather": (
            shard,
            shardcomm.jax.all_gather,
            partial(lax.all_gather, axis_name="ranks", tiled=True),
            np.concatenate([row[r * part :][:part] for r, row in enumerate(everybody)]),
        ),
        "reduce_scatter": (
            mine,
            shardcomm.jax.reduce_scatter,
            partial(lax.psum_scatter, axis_name="ranks", tiled=True),
            everybody.sum(0)[own],
        ),
        "all_reduce": (
            mine,
            shardcomm.jax.all_reduce,
            partial(lax.psum, axis_name="ranks"),
            everybody.sum(0),
        ),
    }
    runs: dict[str, Callable[[], Any]] = {}
    for what, (given, ours, theirs, expected) in cases.items():
        by_gloo, placed = over_gloo(theirs, out_is_whole=what != "reduce_scatter")
        by_us = jax.jit(partial(ours, comm=comm))
        runs[f"{what}/shardcomm"] = partial(by_us, jax.device_put(given, jax.local_devices()[0]))
        runs[f"{what}/gloo"] = partial(by_gloo, placed(given))
        for peer in ("shardcomm", "gloo"):
            result = runs[f"{what}/{peer}"]()
            assert np.array_equal(result.addressable_shards[0].data, expected), (what, size, peer)
    return runs


def steps(comm: Any) -> dict[str, Callable[[], Any]]:
    """The example's loss and gradients, of the same shards and tokens."""

    example = runpy.run_path(str(EXAMPLE))
    layouts = tuple(example["plan"](comm.size))
    random = np.random.default_rng(0)
    shards = [
        random.normal(size=(comm.size, layout.shard_numel))[comm.rank].astype(np.float32) * 0.1
        for layout in layouts
    ]
    rows = (example["BATCH"], example["TOKENS"] + 1)
    tokens = random.integers(0, example["VOCAB"], (comm.size, *rows))[comm.rank].astype(np.int32)

    def step(shards: Any, tokens: Any, gather: Any) -> Any:
        value, grads = jax.value_and_grad(example["loss"])(shards, tokens, layouts, gather)
        return value[None], grads

    by_gloo, placed = over_gloo(
        lambda *given: step(*given, partial(jax.lax.all_gather, axis_name="ranks", tiled=True)),
        out_is_whole=False,
    )
    by_us = jax.jit(partial(step, gather=partial(shardcomm.jax.all_gather, comm=comm)))
    runs = {
        "step/shardcomm": partial(by_us, *jax.device_put((shards, tokens), jax.local_devices()[0])),
        "step/gloo": partial(by_gloo, [placed(shard) for shard in shards], placed(tokens)),
    }
    own, theirs = (
        [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(run())]
        for run in runs.values()
    )
    assert all(jnp.allclose(a, b, atol=1e-6) for a, b in zip(own, theirs, strict=True))
    return runs


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report(["what", "ranks", "size", "shardcomm.jax", "JAX's Gloo", "x Gloo (quartiles)"])
    for ranks in RANKS:
        timings = shardcomm.launch(rank_main, ranks, (free_port(),), timeout_s=600)[0]
        for case in dict.fromkeys(name.rpartition("/")[0] for name in timings):
            add_row(report, ranks, case, timings)
    report.figures["jax"] = jax.__version__
    report.finish(args)


def add_row(report: Report, ranks: int, case: str, timings: Timings) -> None:
    what, size = case.split("/")
    ours, gloo = (Times(tuple(timings[f"{case}/{peer}"])) for peer in ("shardcomm", "gloo"))
    ratios = [b / a for a, b in zip(ours.samples, gloo.samples, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    shown = f"{int(size) >> 10} KiB" if size else "-"
    ratio = gloo.median / ours.median
    if not size or int(size) == SIZES[-1]:
        report.bounds.append(Bound(f"{what} {shown} {ranks} ranks, x Gloo", ratio, at_least=1.0))
    report.row(what, ranks, shown, ours, gloo, f"{ratio:.2f} ({low:.2f}-{high:.2f})")
    report.figures[f"{what} {shown} {ranks} ranks"] = {
        "shardcomm": ours.median,
        "gloo": gloo.median,
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
