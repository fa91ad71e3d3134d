"""Which of torch's tests are run, and how each is presented."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_own.presented import Presentation

_WORLD = "(?i)world ?size"
_GPU = "(?i)CUDA|GPU|accelerator"

# A test has as few ranks as it takes; those of groups of some ranks want eight.
_DISTRIBUTED = (
    Presentation(2),
    Presentation(3, answers=_WORLD),
    Presentation(4, answers=_WORLD),
    Presentation(8, answers=_WORLD),
    Presentation(4, "mpi", answers="MPI"),
    Presentation(2, "gloo", ("nccl",), gpus=True, answers=_GPU),
    Presentation(4, "gloo", ("nccl",), gpus=True, answers=_WORLD),
    Presentation(8, "gloo", ("nccl",), gpus=True, answers=_WORLD),
    Presentation(2, "nccl", ("nccl",), gpus=True, answers="(?i)nccl"),
    Presentation(8, "nccl", ("nccl",), gpus=True, answers=_WORLD),
)
_OTHERS = (
    Presentation(4, stands_for=("gloo",)),
    Presentation(4, stands_for=("gloo", "nccl"), gpus=True, answers=f"{_GPU}|(?i:nccl)"),
)

# Tests that no backend but torch's own can pass, or should: regular expressions for their names, and why.
EXCEPTIONS = {
    r"test_ddp_logging_data_cpu$": "torch's C++ calls every backend that is not its own 'custom'",
    r"test_sequence_num_": "torch's C++ has sequence numbers for its own backends alone",
    r"test_init_process_group_for_all_backends$": "it compares the group's name with 'gloo'",
    r"GlooProcessGroupWith\w+\.test_all_to_all_single$": "a tensor that is not contiguous is welcome",
    r"ProcessGroupGlooTest\.test_\w+_checks$": "it compares the words of errors with Gloo's",
    r"ProcessGroupGlooTest\.test_((sparse_)?allreduce|broadcast)_basics|ProcessGroupGlooTest\.test_allgather_"
    r"(basics|inference_mode|noncontiguous_input)": "several tensors of a rank in one call are refused",
}

# Of a source tree, below test/distributed: what a CPU runs, and what does not bring a backend of its own.
_FILES = (
    "test_c10d_common.py",
    "test_c10d_gloo.py",
    "test_c10d_object_collectives.py",
    "test_c10d_spawn*_gloo.py",
    "test_collective_utils.py",
    "test_device_mesh.py",
    "test_functional_api.py",
    "test_pg_wrapper.py",
    "algorithms/**/test_*.py",
    "optim/test_*.py",
    "_composable/test_replicate.py",
    "_composable/fsdp/test_*.py",
    "_tensor/**/test_*.py",
    "tensor/**/test_*.py",
    "checkpoint/test_*.py",
)


@dataclass(frozen=True)
class Module:
    """A module of tests."""

    name: str
    path: Path
    """Where it is imported from."""
    presentations: tuple[Presentation, ...]


def modules(pytorch: Path | None) -> Iterator[Module]:
    """What torch's wheel has, and a source tree of torch."""
    yield Module("distributed_case", Path(__file__).parent, _DISTRIBUTED)
    if pytorch is None:
        return
    folder = pytorch / "test" / "distributed"
    for pattern in _FILES:
        for file in sorted(folder.glob(pattern)):
            yield Module(str(file.relative_to(folder).with_suffix("")), folder, _OTHERS)
