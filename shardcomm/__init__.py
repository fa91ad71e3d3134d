"""shardcomm moves model shards between ranks, fast.

From the bottom up, each usable on its own: `Layout` (where every element lives), `CopyPlan` (pack and unpack),
`Communicator` (collectives), `Bucket` (a unit's shard and buffers), `Schedule` (what happens when), and
`fully_shard` (an FSDP engine over all of them).

Importing it registers the torch.distributed backend "shardcomm", and does nothing else that a program could notice: no
thread, no process, no change of the environment, nothing on a GPU. The first `fully_shard` of a process adds a hook to
torch's optimizers (`torch.optim.optimizer.register_optimizer_step_pre_hook`) and wraps their state dicts, for the sake
of parameters that it has sharded.
"""

import warnings as _warnings
from importlib.metadata import version as _version

try:
    from shardcomm._C import CommError, CudaError, Event, Stream
except ModuleNotFoundError as error:
    if error.name != "shardcomm._C":
        raise
    raise ModuleNotFoundError(
        f"the compiled core of shardcomm is not beside {__file__}, which are its sources: run `make setup` there, or "
        "work in another folder after `pip install .`",
        name=error.name,
    ) from None

from shardcomm.bucket.bucket import Bucket
from shardcomm.checkpoint.checkpoints import Checkpoints
from shardcomm.checkpoint.manifest import CheckpointError
from shardcomm.comm.bound_collective import BoundCollective
from shardcomm.comm.communicator import Communicator
from shardcomm.comm.connecting import connect
from shardcomm.comm.mesh import Mesh
from shardcomm.comm.pending import Pending
from shardcomm.comm.receipt import Receipt
from shardcomm.comm.words import CtaPolicy, ReduceOp, Sums, Transport, Use
from shardcomm.copy.blocks import BlockFormat, ReduceFormat
from shardcomm.copy.plan import CopyPlan
from shardcomm.copy.segment import Segment
from shardcomm.copy.wire_stats import WireError
from shardcomm.engine.engine import Engine
from shardcomm.engine.gradients import OnNonfinite
from shardcomm.engine.sharding import fully_shard
from shardcomm.files.installed import get_include, get_library_dir
from shardcomm.interop import backend  # registers itself with torch.distributed
from shardcomm.interop.collectives import all_gather_into_tensor, reduce_scatter_tensor
from shardcomm.layout.layout import Layout
from shardcomm.layout.param_spec import Granularity, ParamSpec, RowBlock
from shardcomm.optim.adamw import AdamW
from shardcomm.optim.average import ExponentialMovingAverage
from shardcomm.optim.grad_scaler import GradScaler
from shardcomm.parameter.sharded_parameter import ShardedParameter
from shardcomm.planner.planner import MemoryPlan
from shardcomm.process.launch import RankError, launch
from shardcomm.process.stack_dumps import enable_stack_dumps
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.strategy import STRATEGIES, Strategy
from shardcomm.schedule.triggers import Phase, Trigger
from shardcomm.simulate.machine import Machine
from shardcomm.simulate.simulation import Simulation
from shardcomm.simulate.unit_times import UnitTime, times_by_flops, times_of_trace
from shardcomm.stream.work import Work
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.policy import Policy

__version__ = _version("shardcomm")

__all__ = [
    "STRATEGIES",
    "AdamW",
    "BlockFormat",
    "BoundCollective",
    "Bucket",
    "CheckpointError",
    "Checkpoints",
    "CommError",
    "Communicator",
    "CopyPlan",
    "CtaPolicy",
    "CudaError",
    "Engine",
    "Event",
    "ExponentialMovingAverage",
    "GradScaler",
    "Granularity",
    "Layout",
    "Machine",
    "MemoryPlan",
    "Mesh",
    "MixedPrecision",
    "OnNonfinite",
    "ParamSpec",
    "Pending",
    "Phase",
    "Policy",
    "RankError",
    "Receipt",
    "ReduceFormat",
    "ReduceOp",
    "RowBlock",
    "Schedule",
    "Segment",
    "ShardedParameter",
    "Simulation",
    "Strategy",
    "Stream",
    "Sums",
    "Transport",
    "Trigger",
    "UnitTime",
    "Use",
    "WireError",
    "Work",
    "all_gather_into_tensor",
    "backend",
    "connect",
    "enable_stack_dumps",
    "fully_shard",
    "get_include",
    "get_library_dir",
    "launch",
    "reduce_scatter_tensor",
    "times_by_flops",
    "times_of_trace",
]

_RENAMED = {"Block": RowBlock, "Plan": MemoryPlan}
"""Names that an earlier version had; they go with the next one."""


def __getattr__(name: str) -> object:
    if name not in _RENAMED:
        raise AttributeError(f"module 'shardcomm' has no attribute {name!r}")
    new = _RENAMED[name]
    _warnings.warn(
        f"shardcomm.{name} is called shardcomm.{new.__name__} now", DeprecationWarning, stacklevel=2
    )
    return new
