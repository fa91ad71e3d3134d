"""Whether `shardcomm bench` tells the truth: its Gloo times beside those of a loop written by hand.

2 ranks, float32, all-gather and reduce-scatter by torch.distributed on Gloo. Loop and tool run in turn, several times;
either's time is a mean over iterations and ranks. They agree if their ranges over the rounds meet.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from harness import Bound, Report, Times, arguments

import shardcomm

SIZES = (1 << 10, 64 << 10, 4 << 20)
ITERATIONS, ROUNDS = 50, 5

Means = dict[str, float]


def by_hand() -> Means:
    dist.init_process_group("gloo")
    means = {}
    for size in SIZES:
        whole, part = torch.ones(size // 4), torch.ones(size // 4 // dist.get_world_size())
        for op, run in (
            ("all_gather", lambda w=whole, p=part: dist.all_gather_single(w, p)),
            ("reduce_scatter", lambda w=whole, p=part: dist.reduce_scatter_single(p, w)),
        ):
            run()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(ITERATIONS):
                run()
            means[f"{op} {size} B"] = (time.perf_counter() - start) / ITERATIONS
    dist.destroy_process_group()
    return means


def by_tool() -> Means:
    sizes = ["-b", str(SIZES[0]), "-e", str(SIZES[-1]), "-f", str(SIZES[1] // SIZES[0])]
    options = ["--transport", "torch:gloo", *sizes, "-n", str(ITERATIONS), "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "shardcomm", "bench", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return {
        f"{section['operation']} {row['size_bytes']} B": row["out_of_place"]["time_s"]
        for section in json.loads(done.stdout)["sections"]
        for row in section["rows"]
    }


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report(["operation", "by hand", "shardcomm bench", "tool / hand"])
    hands, tools = [], []
    for _ in range(ROUNDS):
        of_ranks = shardcomm.launch(by_hand, 2, timeout_s=120)
        hands.append({name: sum(m[name] for m in of_ranks) / 2 for name in of_ranks[0]})
        tools.append(by_tool())
    for name in hands[0]:
        hand = Times(tuple(means[name] for means in hands))
        tool = Times(tuple(means[name] for means in tools))
        report.row(name, hand, tool, f"{tool.median / hand.median:.2f}")
        report.figures[name] = {"hand_s": hand.samples, "tool_s": tool.samples}
        ratios = min(tool.samples) / max(hand.samples), min(hand.samples) / max(tool.samples)
        report.bounds.append(Bound(f"{name}, gap between ranges", max(ratios), at_most=1.0))
    report.finish(args)


if __name__ == "__main__":
    main()
