"""What the strategies for Fabric and the Trainer share: how a model is sharded, and how it is saved and loaded.

A checkpoint is one file, as Lightning's DDP writes it, or a folder::

    FOLDER/*.distcp, .metadata    model and optimizers, by torch.distributed.checkpoint: each rank wrote its part
    FOLDER/meta.pt                everything else, by rank 0

Lightning's own FSDP strategies write folders of the same form, and the names in it are the model's own. Either replaces
what was at its path when it is complete (`shardcomm.checkpoint.folders`), and what fails on one rank fails on all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

from shardcomm.arguments.scalars import is_whole
from shardcomm.checkpoint.folders import at, begin, remove, replace
from shardcomm.checkpoint.manifest import files_in, sync
from shardcomm.checkpoint.together import together
from shardcomm.checkpoint.unpickling import check_unpickling
from shardcomm.engine.engine import Engine
from shardcomm.engine.sharding import fully_shard
from shardcomm.interop.backend import NAME
from shardcomm.interop.optimizers import check_not_sharded
from shardcomm.interop.parts import check_parts
from shardcomm.interop.settings import check_settings

StateDictType = Literal["full", "sharded"]

T = TypeVar("T")

_META = "meta.pt"


@dataclass(frozen=True)
class Sharding:
    """How a strategy shards models and saves them.

    Attributes:
        whose: The strategy's name, for messages.
        state_dict_type: Whether a checkpoint is one file ("full") or a folder to which each rank writes ("sharded").
        replicas: How many copies of the model there are: the rows of the mesh, for "hybrid_shard".
        settings: The keyword arguments of `fully_shard`.

    Raises:
        ValueError: `state_dict_type` is none of the two, or `replicas` is no whole number of at least 1.
        TypeError: `settings` has a name that `fully_shard` does not have, or one that the strategy sets itself.
    """

    whose: str
    state_dict_type: StateDictType
    replicas: int
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.state_dict_type not in ("full", "sharded"):
            raise ValueError(
                f"{self.whose}: state_dict_type is {self.state_dict_type!r}; accepted: 'full' (one file), 'sharded' "
                "(a folder)"
            )
        if not is_whole(self.replicas, 1):
            raise ValueError(
                f"{self.whose}: replicas is {self.replicas!r}; it must be a whole number of at least 1"
            )
        check_settings(self.settings, self.whose)

    def shard(self, model: nn.Module, device: torch.device) -> Engine:
        """Shards `model` over all ranks of the default process group; collective."""
        check_not_sharded(model, self.whose)
        ranks = dist.get_world_size()
        if ranks % self.replicas:
            raise ValueError(
                f"{self.whose}: replicas is {self.replicas}, which does not divide the {ranks} ranks"
            )
        shape = (self.replicas, ranks // self.replicas)
        mesh = init_device_mesh(device.type, shape if self.replicas > 1 else shape[1:])
        return fully_shard(model, mesh, **self.settings)


def backend_for(device: torch.device) -> str | None:
    """The process group's backend for ranks on `device`; None: Lightning's own choice."""
    return NAME if device.type == "cpu" else None


def local_path(path: str | Path, whose: str) -> Path:
    """`path`, which must be of a file system that all ranks see.

    Raises:
        ValueError: It is a URL, such as s3://bucket/name.
    """
    if "://" in str(path):
        raise ValueError(
            f"{whose}: the path of the checkpoint is {path}; it must be a path that all ranks see, and no URL, since "
            "every rank writes its part there"
        )
    return Path(path)


def check_own_io(io: Any, storage_options: Any, whose: str) -> None:
    """TypeError if a checkpoint folder is to be written as `io` writes, a CheckpointIO that Lightning was given."""
    given = None if type(io) is TorchCheckpointIO else type(io).__name__
    if given or storage_options is not None:
        raise TypeError(
            f"{whose}: {given or 'storage_options'} is for checkpoints of one file, and with state_dict_type='sharded' "
            "each rank writes its part by torch.distributed.checkpoint; leave it out, or save with "
            "state_dict_type='full'"
        )


def save_folder(folder: Path, values: dict[str, Any], meta: dict[str, Any]) -> None:
    """Writes a checkpoint folder; collective.

    It gets its name when it is complete, and only then replaces what has this name.

    Args:
        folder: The folder, the same on every rank.
        values: By name, what DCP saves: an Engine, its optimizers' states, or dicts of them.
        meta: Everything else, of which rank 0's is written.

    Raises:
        CheckpointError: A rank could not write its part. See `together`.
    """
    with _partial(folder) as partial:
        save(values, checkpoint_id=partial)  # and sync them
        if dist.get_rank() == 0:
            torch.save(meta, partial / _META)
            sync(partial / _META)
            replace(folder, partial)


def load_folder(
    folder: Path,
    values: dict[str, Any],
    *,
    weights_only: bool | None = None,
    optional: Collection[str] = (),
    strict: bool = True,
) -> dict[str, Any]:
    """Reads a checkpoint folder into `values`, in place, and returns the rest, on every rank; collective.

    Args:
        folder: The folder.
        values: As in `save_folder`. Those that are `optional`, and not in the folder, are removed from it.
        weights_only: Unless it is False, nothing is read that would run other code than DCP's and torch's.
        optional: Names of `values` that the folder need not have.
        strict: Whether the folder must have all that `values` consist of, and nothing else of them. Otherwise what it
            lacks stays as it is.

    Raises:
        CheckpointError: Reading would run other code.
        KeyError: The folder lacks one of `values`; nothing is loaded then.
        RuntimeError: It lacks a part of one of them, or has a part that it lacks; nothing is loaded then.
    """
    if weights_only is not False:
        check_unpickling(folder, frozenset(files_in(folder)))
    saved = {*FileSystemReader(folder).read_metadata().state_dict_metadata}
    names = {key.partition(".")[0] for key in saved}
    for name in sorted(values.keys() - names):
        if name not in optional:
            raise KeyError(f"the checkpoint {folder} has no {name!r}; it has {sorted(names)}")
        del values[name]
    if strict:
        instead = "by strict=False (in a LightningModule: self.strict_loading = False)"
        check_parts(folder, values, saved, instead)
    load(values, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=not strict))
    meta: dict[str, Any] = torch.load(folder / _META, "cpu", weights_only=weights_only)
    return meta


def is_folder(path: Path) -> bool:
    """Whether a checkpoint folder is at `path`."""
    return (path / _META).is_file()


def full_optimizer_states(path: Path, states: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Optimizer states of full tensors, as the optimizers would have them without sharding; collective.

    They go through a folder that is written beside `path` and removed again, so that no rank but the first holds more
    than its part.

    Args:
        path: Where the checkpoint will be.
        states: By name, what `Engine.optimizer_state` gives.

    Returns:
        By name, what `state_dict()` of an optimizer of the full parameters would give; {} on all ranks but the first.

    Raises:
        CheckpointError: A rank could not write its part, or rank 0 could not read it. See `together`.
    """
    if not states:
        return {}
    full: dict[str, dict[str, Any]] = {}
    with _partial(path) as partial:
        save(states, checkpoint_id=partial)
        if dist.get_rank() == 0:
            whole = partial / "whole.pt"
            dcp_to_torch_save(partial, whole)
            # This rank has just written it.
            loaded = torch.load(whole, "cpu", weights_only=False)
            full = {name: _numbered(loaded[name]) for name in states}
    return full


@contextmanager
def one_file(path: Path, io: Any) -> Iterator[Path]:
    """A context that gives the path to which rank 0 writes a checkpoint of one file; collective.

    It is a file beside `path`, which replaces what is there in the end; or `path`, for an `io` that may write later.

    Args:
        path: Where the checkpoint will be, the same on every rank.
        io: The CheckpointIO that writes it.

    Raises:
        IsADirectoryError: A folder is there that the file cannot replace; on every rank.
        CheckpointError: Rank 0 could not write the file. See `together`.
    """
    refusal = _of_rank_0(path, lambda: _why_no_file(path, io))
    if refusal:
        raise IsADirectoryError(refusal)
    with _partial(path) as partial:
        replaces = dist.get_rank() == 0 and type(io) is TorchCheckpointIO
        yield partial if replaces else path
        if replaces:
            replace(path, partial)


def _why_no_file(path: Path, io: Any) -> str:
    """Why `io` cannot write a file in place of what is at `path`; "" if it can."""
    of_checkpoint = is_folder(at(path))
    if of_checkpoint and type(io) is not TorchCheckpointIO:
        return (
            f"the path of the checkpoint is a checkpoint folder, which is removed when the file is there, and "
            f"{type(io).__name__} may write it later; move the folder away: {path}"
        )
    if path.is_dir() and not of_checkpoint:
        return (
            f"the path of the checkpoint is a folder that is no checkpoint, and state_dict_type='full' writes a file: "
            f"{path}"
        )
    return ""


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A context that gives a new path beside `path`, the same on every rank; what is there in the end is removed.

    Collective. An error in it on one rank is an error on all, as `together` says.
    """
    partial = _of_rank_0(path, lambda: begin(path))
    with _saving(path):
        try:
            yield partial
        finally:
            if dist.get_rank() == 0:
                remove(partial)


def _of_rank_0(path: Path, call: Callable[[], T]) -> T:
    """What `call` returns on rank 0, which alone calls it, on every rank; collective."""
    returned: list[Any] = [None]
    with _saving(path):
        if dist.get_rank() == 0:
            returned = [call()]
    dist.broadcast_object_list(returned)
    return cast("T", returned[0])


def _saving(path: Path) -> AbstractContextManager[None]:
    """A context that fails on every rank if it fails on one. Its end is collective."""
    ranks = cast("dist.ProcessGroup", dist.group.WORLD)
    return together(ranks, f"the checkpoint {path} was not saved", path)


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by parameters' names, as torch numbers them: in the order of the groups."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    return {
        # DCP writes no empty dict: SGD without momentum has no "state".
        "state": {number[name]: kept for name, kept in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [number[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }
