"""A GPT's step and its training with parameters and gradients in cheaper formats on the wire, against float32.

The step is forward and backward of compare_fsdp2's model across 2 hosts of 2 ranks each, which are namespaces of this
machine (`shardcomm.cluster`); `tc` holds their link to 1 Gbit/s in each direction. A rank has 128 tokens, for which
float32's step takes the cores as long as the link, or 16, for which it takes the link longer. Formats take turns in
each round. Times are medians of the slowest rank. No step can be faster than these:

- "bytes / rate": the bytes that come into a host in a step, counted at its link, at the link's rate;
- "work / cores": the time that the threads of all four ranks ran, divided by this machine's cores;
- "no communication": the same model, where four ranks share the cores all the same.

The training is 1,000 steps of a GPT of width 64, 2 blocks, 64 tokens x batch 8 per rank, on the same hosts with faster
links, by AdamW on the standard library's sources, from the same seed. The loss is the mean of the last 100 steps, of
all ranks. --losses FILE trains nothing, and takes the losses of an earlier result, where nothing that decides them has
changed since.

In both, `engine.wire_error()` is asked after each step: no error is larger than the format's bound. Where hosts cannot
be made, it says why, and measures nothing.

    python bench/formats.py [--losses FILE] [--json FILE] [--check]
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from formats_rank import ALONE, BASE, BATCHES, FORMATS, Taken, tokens_of, trained
from harness import Bound, Report, Times, arguments

from shardcomm.cluster import Cluster, refusal

HOSTS, RANKS_A_HOST, RATE, FAST = 2, 2, "1gbit", "10gbit"
RATE_BYTES_A_SECOND = 1e9 / 8
WANTED = {"mxint8 gathers, bf16 reduces": 0.4}  # of float32's time
TIMEOUT_S = 500.0
RANK_PROGRAM = Path(__file__).with_name("formats_rank.py")


def measured_steps() -> Taken:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "taken.json")
        cluster = Cluster(HOSTS, RANKS_A_HOST, RATE)
        cluster.run([str(RANK_PROGRAM), str(file)], timeout_s=TIMEOUT_S)
        taken: Taken = json.loads(file.read_text())
        return taken


def measured_losses(report: Report) -> dict[str, list[str]]:
    """The table's cells of each format: the loss, and its difference from float32's."""
    losses = {}
    for name in FORMATS:
        (curve, *_) = Cluster(HOSTS, RANKS_A_HOST, FAST).run(trained, (name,), timeout_s=TIMEOUT_S)
        assert curve is not None
        losses[name] = sum(curve[-100:]) / 100
        report.figures[f"losses, {name}"] = curve[9::10]
    return {name: [f"{loss:.4f}", f"{loss - losses[BASE]:+.4f}"] for name, loss in losses.items()}


def earlier_losses(report: Report, file: Path) -> dict[str, list[str]]:
    """The same cells of an earlier result."""
    earlier = json.loads(file.read_text())
    for name in FORMATS:
        report.figures[f"losses, {name}"] = earlier["figures"][f"losses, {name}"]
    here = f"{earlier['date']}, {earlier['machine']['cpu']}"
    report.figures["losses measured"] = earlier["figures"].get("losses measured", here)
    return {row[0]: row[-2:] for row in earlier["table"][1:] if row[-2] != "-"}


def add_row(
    report: Report,
    name: str,
    batch: str,
    steps: dict[str, dict[str, list[float]]],
    losses: dict[str, list[str]],
) -> None:
    """What a step of `batch` takes in the format `name`; beside the first batch, the loss of the training."""
    times, base = (Times(tuple(steps[each]["seconds"])) for each in (name, BASE))
    ratio = times.median / base.median
    received = max(steps[name]["received"])
    work = Times(tuple(each / (os.cpu_count() or 1) for each in steps[name]["cpu_seconds"]))
    report.figures[f"{name}, {batch}"] = steps[name]
    if name in WANTED:
        bound = Bound(f"{name}, {batch}: step / float32's", ratio, at_most=WANTED[name])
        report.bounds.append(bound)
    report.row(
        *(name, batch, str(times), f"{ratio:.2f}", f"{received / 1e6:.1f}"),
        *(f"{received / RATE_BYTES_A_SECOND * 1e3:.0f} ms", f"{work.median * 1e3:.0f} ms"),
        *(losses.get(name, ["-", "-"]) if batch == tokens_of(BATCHES[0]) else ["-", "-"]),
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--losses", type=Path, metavar="FILE", help="train nothing: as in FILE")
    args = parser.parse_args()
    report = Report(
        [
            "on the wire",
            "a rank has",
            "step at 1 Gbit/s",
            "/ float32",
            "into a host, MB",
            "bytes / rate",
            "work / cores",
            "loss after 1,000 steps",
            "- float32",
        ]
    )
    if why_not := refusal():
        print(why_not)
        return
    losses = earlier_losses(report, args.losses) if args.losses else measured_losses(report)
    steps = measured_steps()
    for batch in map(tokens_of, BATCHES):
        for name in (*FORMATS, ALONE):
            add_row(report, name, batch, steps[batch], losses)
    report.finish(args)


if __name__ == "__main__":
    main()
