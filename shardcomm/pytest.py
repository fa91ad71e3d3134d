"""A plugin of pytest: the fixture `cluster`, for tests of several hosts on one machine.

A test suite asks for it, in its topmost conftest.py::

    pytest_plugins = ["shardcomm.pytest"]

It does not register itself: each run of pytest would then load torch, and find a fixture named `cluster` that nobody
had asked for, and that other plugins have, too.
"""

import pytest

from shardcomm.cluster import Cluster, refusal

__all__ = ["cluster"]


@pytest.fixture
def cluster() -> type[Cluster]:
    """Makes clusters on this machine; skips the test, with a sentence, where this process may not make hosts.

    Example:
        ```py
        def test_all_ranks_come_to_one_sum(cluster):
            assert cluster(hosts=2, ranks=2, rate="1gbit").run(sum_of_ranks, timeout_s=60) == [6] * 4
        ```
    """
    if why_not := refusal():
        pytest.skip(why_not)
    return Cluster
