"""The report that a training run prints at its end, and writes as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from shardcomm.cli.options import opened
from shardcomm.cli.train.job import Result, TrainOptions
from shardcomm.cli.train.progress import in_json
from shardcomm.files.provenance import provenance

# Rows that a run leaves out if it had no step left to do.
_OF_STEPS = ("tokens/s", "gradients / rank", "communicated / step")


def table(result: Result) -> str:
    """A line each for loss, speed, memory beside its theoretical value, and communication."""
    share = result.total_parameter_bytes / result.shard_ranks
    divided = {1: "total", result.ranks: "total / ranks"}
    theory = divided.get(result.shard_ranks, f"total / {result.shard_ranks} of them")
    held = {
        "parameters": (result.parameter_bytes, share),
        "gradients": (result.gradient_bytes, share),
        "optimizer state": (result.optimizer_bytes, 2 * share),
    }
    where = [result.transport, result.device.partition(":")[0]]
    where += ["offloaded"] if result.cpu_offload else []
    rows = [
        ("ranks", f"{result.ranks} ({', '.join(where)})"),
        ("loss", f"{result.losses[0]:.3f} -> {result.losses[-1]:.3f} ({len(result.losses)} steps)"),
        ("tokens/s", f"{result.tokens_per_s:,.0f}"),
        *(
            (f"{name} / rank", f"{_mib(have)}, {theory} = {_mib(least)}")
            for name, (have, least) in held.items()
        ),
        ("padding, all ranks", _mib(result.padding_bytes)),
        (
            "communicated / step",
            f"{_mib(result.gathered_bytes)} gathered, {_mib(result.reduced_bytes)} reduced, per rank",
        ),
        ("time / step", _time(result)),
    ]
    if not result.measured_steps:
        rows = [(name, value) for name, value in rows if name not in _OF_STEPS]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, "", "sample:", *(f"  | {s}" for s in _printable(result.sample))])


def _time(result: Result) -> str:
    if not result.measured_steps:
        return "not measured: no step was left to do"
    compute_s, share = result.step_s - result.exposed_s, result.exposed_s / result.step_s
    return (
        f"{result.step_s * 1e3:.1f} ms = {compute_s * 1e3:.1f} compute + "
        f"{result.exposed_s * 1e3:.1f} exposed communication ({share:.1%})"
    )


def _printable(text: str) -> list[str]:
    """The lines of `text`, made harmless for a terminal, whatever bytes the model has generated."""
    shown = ("".join(c if c.isprintable() else "\ufffd" for c in line) for line in text.split("\n"))
    return [line.rstrip() for line in shown]


def write_json(path: str, options: TrainOptions, result: Result) -> None:
    """Writes the whole result, with the options, the machine and the versions; "-" is stdout."""
    report = {
        **provenance(" ".join(["shardcomm", *sys.argv[1:]])),
        "options": asdict(options),
        **asdict(result),
        "losses": in_json(result.losses),
    }
    with opened(path) as file:
        file.write(json.dumps(report, indent=1) + "\n")


def _mib(count: float) -> str:
    return f"{count / 2**20:.2f} MiB"
