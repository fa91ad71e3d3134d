"""AdamW over runs of neighbours against torch.optim.AdamW: its plain loop, foreach and fused.

The optimizer's step alone, float32, on parameters and gradients that lie as in a sharded model: many small ones, ten to
a bucket, and those of a GPT, a block to a bucket. All must end with the same parameters, within rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from harness import Bound, Report, Times, arguments
from torch import nn

import shardcomm
from shardcomm.models.gpt import GPT

PEERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "shardcomm": shardcomm.AdamW,
    "torch fused": lambda params: torch.optim.AdamW(params, fused=True),
    "torch foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "torch loop": lambda params: torch.optim.AdamW(params, foreach=False, fused=False),
}


def small() -> list[Sequence[int]]:
    return [[256] * 10] * 100


def gpt() -> list[Sequence[int]]:
    blocks = GPT(width=512, layers=8, context=128).blocks
    return [[param.numel() for param in block.parameters()] for block in blocks]


def parameters(buckets: Sequence[Sequence[int]]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    params = []
    for numels in buckets:
        shard, shard_grad = torch.randn(2, sum(numels))
        for values, grad in zip(shard.split(numels), shard_grad.split(numels), strict=True):
            params.append(nn.Parameter(values))
            params[-1].grad = grad
    return params


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    report = Report(["parameters", "optimizer", "step (p10-p90)", "shardcomm is faster by"])
    cases = {
        "1,000 of 1 KiB": (small(), 1.5),
        "GPT of 25 M": (gpt(), 0.95),
    }  # bound by memory: alike
    for case, (buckets, wanted) in cases.items():
        optimizers = {name: make(parameters(buckets)) for name, make in PEERS.items()}
        samples: dict[str, list[float]] = {name: [] for name in PEERS}
        for round_ in range(args.rounds + 3):
            for name, optimizer in optimizers.items():
                start = time.perf_counter()
                optimizer.step()
                if round_ >= 3:
                    samples[name].append(time.perf_counter() - start)
        final = {name: o.param_groups[0]["params"] for name, o in optimizers.items()}
        times = {name: Times(tuple(values)) for name, values in samples.items()}
        for name in PEERS:
            for mine, theirs in zip(final["shardcomm"], final[name], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            ratio = times[name].median / times["shardcomm"].median
            report.row(case, name, times[name], f"{ratio:.2f}")
            report.figures[f"{case}: {name}"] = {"median_s": times[name].median, "ratio": ratio}
            if name == "torch fused":
                report.bounds.append(Bound(f"{case}: x {name}", ratio, at_least=wanted))
    report.finish(args)


if __name__ == "__main__":
    main()
