"""A GPT's step and its training with parameters and gradients in cheaper formats on the wire, against float32.

The step is forward and backward of compare_fsdp2's model across 2 hosts of 2 ranks each, which are namespaces of this
machine (`shardcomm.cluster`); `tc` holds their link to 1 Gbit/s in each direction. Formats take turns in each round.
The limit is the same model without any communication; all ranks share this machine's cores. Times are medians of the
slowest rank. The bytes that come into a host are counted at its link, per step.

The training is 1,000 steps of a GPT of width 64, 2 blocks, 64 tokens x batch 8 per rank, on the same hosts with faster
links, by AdamW on the standard library's sources, from the same seed. The loss is the mean of the last 100 steps, of
all ranks.

In both, `engine.wire_error()` is asked after each step: no error is larger than the format's bound. Where hosts cannot
be made, it says why, and measures nothing. --steps measures the step alone, in two minutes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from formats_rank import ALONE, BASE, FORMATS, trained
from harness import Bound, Report, Times, arguments

from shardcomm.cluster import Cluster, refusal

HOSTS, RANKS_A_HOST, RATE, FAST = 2, 2, "1gbit", "10gbit"
WANTED = {"mxint8 gathers, bf16 reduces": 0.4}  # of float32's time
TIMEOUT_S = 500.0
RANK_PROGRAM = Path(__file__).with_name("formats_rank.py")


def measured_steps() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "taken.json")
        cluster = Cluster(HOSTS, RANKS_A_HOST, RATE)
        cluster.run([str(RANK_PROGRAM), str(file)], timeout_s=TIMEOUT_S)
        taken: dict[str, Any] = json.loads(file.read_text())
        return taken


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", action="store_true", help="train nothing")
    args = parser.parse_args()
    report = Report(
        [
            *("on the wire", "step at 1 Gbit/s", "/ float32", "into a host, MB", "/ float32"),
            *("loss after 1,000 steps", "- float32"),
        ]
    )
    if why_not := refusal():
        print(why_not)
        return
    losses = {}
    for name in () if args.steps else FORMATS:
        (curve, *_) = Cluster(HOSTS, RANKS_A_HOST, FAST).run(trained, (name,), timeout_s=TIMEOUT_S)
        assert curve is not None
        losses[name] = sum(curve[-100:]) / 100
        report.figures[f"losses, {name}"] = curve[9::10]
    steps = measured_steps()
    for name in (*FORMATS, ALONE):
        times, base = (Times(tuple(steps[each]["seconds"])) for each in (name, BASE))
        ratio = times.median / base.median
        received, most = (sorted(steps[each]["received"])[-1] for each in (name, BASE))
        cells = [str(times), f"{ratio:.2f}", f"{received / 1e6:.1f}", f"{received / most:.2f}"]
        report.figures[name] = steps[name]
        if name in WANTED:
            report.bounds.append(Bound(f"{name}: step / float32's", ratio, at_most=WANTED[name]))
        loss = ["-", "-"]
        if name in losses:
            loss = [f"{losses[name]:.4f}", f"{losses[name] - losses[BASE]:+.4f}"]
        report.row(name, *cells, *loss)
    report.finish(args)


if __name__ == "__main__":
    main()
