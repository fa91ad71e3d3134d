"""The slowest of many ranks, drawn at once, against as many draws and their maximum."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from shardcomm.simulate.stragglers import slowest_factors


@pytest.mark.parametrize("ranks", [1, 8, 1000])
def test_the_slowest_of_many_is_distributed_as_the_maximum_of_many(ranks: int) -> None:
    drawn = [math.log(each) / 0.1 for each in slowest_factors(0.1, ranks, 4000, seed=1)]
    maxima = np.random.default_rng(2).standard_normal((4000, ranks)).max(axis=1)
    assert statistics.mean(drawn) == pytest.approx(maxima.mean(), abs=0.08)
    assert statistics.stdev(drawn) == pytest.approx(maxima.std(), rel=0.08)


def test_more_ranks_have_a_slower_one() -> None:
    few, many = (slowest_factors(0.05, ranks, 50, seed=3) for ranks in (8, 16384))
    assert all(a < b for a, b in zip(few, many, strict=True))


def test_ranks_that_do_not_differ_have_the_factor_1() -> None:
    assert slowest_factors(0.0, 16384, 3, seed=0) == [1.0, 1.0, 1.0]


def test_a_seed_repeats_the_draws() -> None:
    assert slowest_factors(0.1, 64, 5, seed=7) == slowest_factors(0.1, 64, 5, seed=7)
    assert slowest_factors(0.1, 64, 5, seed=7) != slowest_factors(0.1, 64, 5, seed=8)
