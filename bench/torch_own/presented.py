"""How a backend is presented to torch's tests, which know Gloo, NCCL and MPI by name.

By these names the tests decide which of them run, and what they expect. A backend of another name would be asked
little. Each liberty that is taken, so that it is asked what Gloo is asked, stands in `LIBERTIES`; Gloo itself is
presented in the same way.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import weakref
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from typing import Any

from shardcomm.process.parent import signal_at_its_end

LIBERTIES = (
    "DistributedTest's decorators choose tests as for Gloo; those for MPI or NCCL alone, as for these",
    "DistributedTest gets a name of the backend that equals 'gloo' as well as itself",
    "DistributedTest's lists of backends whose collectives the profiler records have the backend",
    "dist.monitored_barrier reaches the backend, though torch refuses it to one of another name",
    "the backend has Gloo's create_device, of which tests ask and which they do not use",
    "a group that any other test wants of Gloo is the backend's, ProcessGroupGloo(...) included",
    "where a test wants GPUs, the CPU stands in for them, and the backend for NCCL",
    "ranks are forked from a process that has imported torch, not started as new interpreters",
)


@dataclass(frozen=True)
class Presentation:
    """What a test is shown."""

    world_size: int
    """Of a test that leaves it to the environment."""
    chosen_as: str = "gloo"
    """The backend by whose name DistributedTest decides what to run."""
    stands_for: tuple[str, ...] = ()
    """The backends whose groups are made with the one that is tested, when a test asks for them."""
    gpus: bool = False
    """Whether the CPU stands in for GPUs."""
    answers: str = ""
    """Tests are shown it that were skipped before for a reason in which this regular expression is found."""

    def show(self, backend: str) -> None:
        """From now on tests that this process imports run with `backend`, a name for `init_process_group`."""
        os.environ["TESTED_BACKEND"] = backend
        os.environ["BACKEND"] = self.chosen_as
        os.environ["WORLD_SIZE"] = str(self.world_size)
        # Wanted by an import, and set again by each test.
        os.environ.setdefault("TEMP_DIR", os.curdir)
        _fork_ranks()
        _count_as_available(backend)
        if self.gpus:
            from torch_own import played_gpus

            played_gpus.install()
        _make_groups(backend, self.stands_for)


class Name(str):
    """A backend's name, which tests compare with Gloo's."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def _count_as_available(backend: str) -> None:
    from torch.testing._internal.common_distributed import DistTestCases

    DistTestCases.backend_feature["plugin"].add(backend)


def _make_groups(backend: str, instead_of: tuple[str, ...]) -> None:
    import torch.distributed as dist

    parse = dist.Backend.__new__

    def parsed(cls: type, name: str) -> Any:
        return backend if isinstance(name, str) and name in instead_of else parse(cls, name)

    dist.Backend.__new__ = parsed
    # For dist.monitored_barrier alone; tests see torch.distributed's.
    name_of = dist.distributed_c10d.get_backend
    dist.distributed_c10d.get_backend = lambda group=None: Name(name_of(group))
    if "gloo" in instead_of and backend != "gloo":
        dist.ProcessGroupGloo = _made_directly(backend, dist.ProcessGroupGloo)


def _made_directly(backend: str, gloo: Any) -> Any:
    """Stands in for the class ProcessGroupGloo."""
    import torch.distributed as dist

    plugin = dist.Backend._plugins[backend.upper()]

    def created(*args: Any) -> Any:
        group = plugin.creator_fn(*args)
        type(group).create_device = gloo.create_device
        return group

    dist.Backend._plugins[backend.upper()] = plugin._replace(creator_fn=created)

    class Group:
        _Options = gloo._Options
        create_device = gloo.create_device
        create_default_device = gloo.create_default_device

        def __new__(
            cls, store: Any, rank: int, size: int, options: Any = None, **kwargs: Any
        ) -> Any:
            timeout = kwargs.get("timeout", getattr(options, "_timeout", options))
            return created(store, rank, size, timeout)

    return Group


def _fork_ranks() -> None:
    import torch
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    # Tests that start ranks by the default method ask for "spawn", and take no for an answer.
    multiprocessing.set_start_method("fork")
    torch.multiprocessing.Process = _Rank
    MultiProcessTestCase._spawn_processes = lambda test: test._start_processes(_Rank)


class _Rank(ForkProcess):
    def run(self) -> None:
        signal_at_its_end(signal.SIGKILL)
        # Folders of the processes that this one is forked from are not its own to remove.
        for finalizer in list(weakref.finalize._registry):
            finalizer.atexit = False
        # A new interpreter ends with its atexit functions; a forked process would leave them out.
        try:
            super().run()
        finally:
            atexit._run_exitfuncs()
