"""pack.py's contests under pytest-benchmark: each operation is a group of ours, PyTorch's copies and a memcpy.

    pytest bench/bench_kernels.py --benchmark-json FILE

One thread. Results are compared with PyTorch's when a contest is set up. A contender runs all its rounds at once: what
the machine does meanwhile hits that one alone; for ratios, see pack.py, where they take turns.
"""

from __future__ import annotations

import pytest
import torch
from pack import CONTESTS, SEED, Contest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.fixture(scope="module", params=CONTESTS, ids=lambda make: make.__name__)
def contest(request: pytest.FixtureRequest) -> Contest:
    torch.set_num_threads(1)
    made: Contest = request.param(torch.Generator().manual_seed(SEED))
    return made


@pytest.mark.parametrize(
    "contender",
    ["ours", "memcpy", "copy_", "loop of copy_", "_foreach_copy_", "copy_ and add_"],
)
def test_kernel(benchmark: BenchmarkFixture, contest: Contest, contender: str) -> None:
    operations = {"ours": contest.ours, **contest.references}
    if contender not in operations:
        pytest.skip("not a contender of this contest")
    benchmark.group = contest.name
    benchmark(operations[contender])
