"""What the checks of sharded parameters cost in an optimizer's step and zero_grad, against plain parameters.

400 weights of 16 x 16, float32. In the first case a rank has rows of each, beside another rank, which is a thread of
the same process; in the second a rank alone has the whole of each. Their optimizer is called on one thread: with its
checks, and with the same parameters and gradients made plain, without shardcomm's hooks. Memory and state are the same
in both: other tensors, which are elsewhere in the caches, differ by as much as the checks cost. The plain calls are
made twice in each round, in changing order; the difference of these two is the error of the others.

The difference is given per parameter, of medians: at most 1 us for both calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from harness import Bound, Report, Times, arguments
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import shardcomm

COUNT, WIDTH = 400, 16

OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW for-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
    "SGD for-loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
}
KINDS = ("sharded", "plain", "again")


def sharded(comm: shardcomm.Communicator) -> list[nn.Parameter]:
    """This rank's rows of all weights, with gradients."""
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(COUNT)))
    shardcomm.fully_shard(net, comm, units=list(net)[::20])
    net(torch.randn(1, WIDTH)).sum().backward()
    return list(net.parameters())


@contextmanager
def made_plain(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Makes parameters and gradients of torch's own classes, and takes shardcomm's hooks of optimizers away."""
    kinds = [type(tensor) for tensor in tensors]
    hooks: dict[int, Any] = _global_optimizer_pre_hooks  # type: ignore[assignment]
    kept, zero_grad = dict(hooks), torch.optim.Optimizer.zero_grad
    hooks.clear()
    torch.optim.Optimizer.zero_grad = zero_grad.__wrapped__  # type: ignore[attr-defined, method-assign]
    for tensor in tensors:
        tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    yield
    for tensor, kind in zip(tensors, kinds, strict=True):
        tensor.__class__ = kind
    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    hooks.update(kept)


def seconds_of(
    optimizer: torch.optim.Optimizer, grads: Sequence[tuple[nn.Parameter, torch.Tensor]]
) -> tuple[float, float, float]:
    """The seconds of a step, of a zero_grad, and of both; `grads` are shown before, and untimed."""
    for param, grad in grads:
        param.grad = grad
    # At a large allocation malloc sorts what was freed since the last one: here, and not at the cost of a call.
    bytearray(2**16)
    begin = time.perf_counter()
    optimizer.step()
    stepped = time.perf_counter()
    optimizer.zero_grad()
    end = time.perf_counter()
    return stepped - begin, end - stepped, end - begin


def measure(report: Report, case: str, params: Sequence[nn.Parameter], rounds: int) -> None:
    grads = [(param, param.grad) for param in params if param.grad is not None]
    for _, grad in grads:
        grad.fill_(1.0)  # those of a deep chain are denormal, with which a CPU is slow
    tensors = [tensor for pair in grads for tensor in pair]
    for name, make in OPTIMIZERS.items():
        optimizers = {kind: make(params) for kind in KINDS}
        for optimizer in optimizers.values():
            optimizer.state = optimizers["sharded"].state
        samples: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
        for round_ in range(rounds + 10):
            first = round_ % len(KINDS)
            for kind in (*KINDS[first:], *KINDS[:first]):
                with nullcontext() if kind == "sharded" else made_plain(tensors):
                    seconds = seconds_of(optimizers[kind], grads)
                if round_ >= 10:
                    samples[kind].append(seconds)
        # Of each kind the step, the zero_grad, and both.
        times = {kind: [Times(each) for each in zip(*samples[kind], strict=True)] for kind in KINDS}

        def us_beside_plain(kind: str, times: dict[str, list[Times]] = times) -> list[float]:
            pairs = zip(times[kind], times["plain"], strict=True)
            return [(one.median - plain.median) / COUNT * 1e6 for one, plain in pairs]

        figures = dict(
            zip(("step_us", "zero_grad_us", "both_us"), us_beside_plain("sharded"), strict=True)
        )
        figures["error_us"] = us_beside_plain("again")[-1]
        both = [times[kind][-1] for kind in ("sharded", "plain")]
        report.row(f"{name}, {case}", *both, *(f"{us:.2f}" for us in figures.values()))
        report.figures[f"{name}, {case}"] = figures
        report.bounds.append(
            Bound(f"{name}, {case}: us a parameter", figures["both_us"], at_most=1.0)
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=120)
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
            "error us",
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
