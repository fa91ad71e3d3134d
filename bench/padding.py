"""Padding of the layout on real transformer blocks, 2 to 1,024 ranks, beside other methods; no hardware involved.

"row": shards cut between rows of dim 0. "auto": the layout chooses the dim that is stored
outermost. "LCM": the shard is rounded up to a common multiple of all row sizes, as Megatron-FSDP v2
does. "FSDP2": every parameter is chunked on dim 0 by itself, the last chunks padded. Also the time
to plan a unit of 300 random parameters for 1,024 ranks (limit: 10 ms).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from harness import Bound, Report, Times, arguments

from shardcomm import Layout, ParamSpec
from shardcomm.models.shapes import SHAPES

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

BLOCKS = {
    "Llama-3-8B": list(SHAPES["llama3-8b"].block.values()),
    "GPT-2": list(SHAPES["gpt2"].block.values()),
}


def specs(shapes: Sequence[tuple[int, ...]], dim: object) -> list[ParamSpec]:
    return [
        ParamSpec(str(i), shape, shard_dim=dim if len(shape) > 1 else 0)  # type: ignore[arg-type]
        for i, shape in enumerate(shapes)
    ]


def lcm_padding(shapes: Sequence[tuple[int, ...]], ranks: int) -> float:
    multiple = math.lcm(*(math.prod(shape[1:]) for shape in shapes))
    numel = sum(map(math.prod, shapes))
    return math.ceil(numel / ranks / multiple) * multiple * ranks / numel - 1


def fsdp2_padding(shapes: Sequence[tuple[int, ...]], ranks: int) -> float:
    padded = sum(math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:]) for shape in shapes)
    return padded / sum(map(math.prod, shapes)) - 1


def planning_s() -> Times:
    choose = random.Random(0)
    params = [
        ParamSpec(str(i), (choose.randint(1, 5000), choose.randint(1, 5000))) for i in range(300)
    ]
    samples = []
    for _ in range(20):
        start = time.perf_counter()
        Layout.plan(params, 1024)
        samples.append(time.perf_counter() - start)
    return Times(tuple(samples))


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report(["ranks", *map(str, RANKS)])
    for block, shapes in BLOCKS.items():
        rows: dict[str, list[str]] = {"row": [], "auto": [], "LCM": [], "FSDP2": []}
        for ranks in RANKS:
            row = Layout.plan(specs(shapes, 0), ranks).padding_fraction
            auto = Layout.plan(specs(shapes, "auto"), ranks).padding_fraction
            others = (lcm_padding(shapes, ranks), fsdp2_padding(shapes, ranks))
            fractions = dict(zip(rows, (row, auto, *others), strict=True))
            for method, fraction in fractions.items():
                rows[method].append(f"{fraction:.2%}")
            name = f"{block}, {ranks} ranks"
            report.figures[name] = fractions
            if ranks <= (64 if block == "Llama-3-8B" else 8):
                report.bounds.append(Bound(f"{name}, row", row, at_most=0.01))
            if block == "Llama-3-8B" or ranks <= 64:
                report.bounds.append(Bound(f"{name}, auto", auto, at_most=0.02))
        for method, cells in rows.items():
            report.row(f"{block}, {method}", *cells)
    planning = planning_s()
    report.figures["planning"] = {"median_s": planning.median}
    report.bounds.append(Bound("planning, s", planning.median, at_most=0.01))
    report.finish(args)


if __name__ == "__main__":
    main()
