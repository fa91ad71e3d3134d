"""Torch's `DistributedTest`, which is abstract, made a test case as torch's own test_distributed_spawn.py makes it."""

from __future__ import annotations

import os

from torch.testing._internal.distributed import distributed_test
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from torch_own.presented import Name

BACKEND = os.environ["TESTED_BACKEND"]

# What decorators have read of the environment is another name.
distributed_test.BACKEND = Name(BACKEND)
for names in (
    distributed_test.PROFILING_SUPPORTED_BACKENDS,
    distributed_test.CUDA_PROFILING_SUPPORTED_BACKENDS,
    distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
):
    names.append(BACKEND)


class TestDistributed(TestDistBackend, DistributedTest._DistTestBase):
    """Each test has as many ranks as the environment's WORLD_SIZE says."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


del TestDistBackend  # which is a test case, but has no tests
