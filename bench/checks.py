"""What the checks of sharded parameters cost in an optimizer's step and zero_grad, against plain parameters.

400 weights of 16 x 16, float32. In the first case a rank has rows of each, beside another rank, which is a thread of
the same process; in the second a rank alone has the whole of each. An optimizer of these and one of plain parameters of
the same shapes are called in turn, on one thread. The difference is given per parameter: at most 1 us for both calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from harness import Bound, Report, Times, arguments
from torch import nn

import shardcomm
from shardcomm.parameter.plain import plain

COUNT, WIDTH = 400, 16

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW for-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "SGD for-loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
}


def sharded(comm: shardcomm.Communicator) -> list[nn.Parameter]:
    """This rank's rows of all weights, with gradients."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    shardcomm.fully_shard(net, comm, units=list(net)[::20])
    net(torch.randn(1, WIDTH)).sum().backward()
    return list(net.parameters())


def plain_like(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    with plain():
        alike = [nn.Parameter(torch.ones_like(param)) for param in params]
    for param in alike:
        param.grad = torch.ones_like(param)
    return alike


def seconds_of(
    optimizer: torch.optim.Optimizer, grads: Sequence[tuple[nn.Parameter, torch.Tensor]]
) -> tuple[float, float]:
    """The seconds of a step and of a zero_grad; `grads` are shown before, and untimed."""
    for param, grad in grads:
        param.grad = grad
    begin = time.perf_counter()
    optimizer.step()
    stepped = time.perf_counter()
    optimizer.zero_grad()
    return stepped - begin, time.perf_counter() - stepped


def measure(report: Report, case: str, params: Sequence[nn.Parameter], rounds: int) -> None:
    kinds = {"sharded": params, "plain": plain_like(params)}
    grads = {}
    for kind, each in kinds.items():
        grads[kind] = [(param, param.grad) for param in each if param.grad is not None]
        for _, grad in grads[kind]:
            grad.fill_(1.0)  # those of a deep chain are denormal, with which a CPU is slow
    for name, make in OPTIMIZERS.items():
        optimizers = {kind: make(each) for kind, each in kinds.items()}
        samples: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for round_ in range(rounds + 10):
            for kind, optimizer in optimizers.items():
                seconds = seconds_of(optimizer, grads[kind])
                if round_ >= 10:
                    samples[kind].append(seconds)
        both = {kind: Times(tuple(map(sum, each))) for kind, each in samples.items()}
        medians = {
            kind: [Times(part).median for part in zip(*each, strict=True)]
            for kind, each in samples.items()
        }
        step_us, zero_grad_us = (
            (ours - theirs) / COUNT * 1e6
            for ours, theirs in zip(medians["sharded"], medians["plain"], strict=True)
        )
        total_us = (both["sharded"].median - both["plain"].median) / COUNT * 1e6
        cells = [f"{us:.2f}" for us in (step_us, zero_grad_us, total_us)]
        report.row(f"{name}, {case}", both["sharded"], both["plain"], *cells)
        report.figures[f"{name}, {case}"] = {
            "step_us": step_us,
            "zero_grad_us": zero_grad_us,
            "both_us": total_us,
        }
        report.bounds.append(Bound(f"{name}, {case}: us a parameter", total_us, at_most=1.0))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report(
        [
            "optimizer, parameters",
            "sharded (p10-p90)",
            "plain",
            "step us",
            "zero_grad us",
            "both us",
        ]
    )
    for case, ranks in {"rows": 2, "whole": 1}.items():
        comms = shardcomm.Communicator.local_group(ranks)
        with ThreadPoolExecutor(ranks) as pool:
            params, *_ = pool.map(sharded, comms)
        measure(report, case, params, args.rounds)
    report.finish(args)


if __name__ == "__main__":
    main()
