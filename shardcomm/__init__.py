"""shardcomm moves model shards between ranks, fast.

From the bottom up, each usable on its own: `Layout` (where every element lives), `CopyPlan` (pack and unpack),
`Communicator` (collectives), `Bucket` (a unit's shard and buffers), `Schedule` (what happens when), and
`fully_shard` (an FSDP engine over all of them).
"""

from importlib.metadata import version as _version

from shardcomm._C import CommError, CudaError, Event, Stream
from shardcomm.bucket.bucket import Bucket
from shardcomm.checkpoint.checkpoints import CheckpointError, Checkpoints
from shardcomm.comm.communicator import Communicator, Receipt
from shardcomm.comm.mesh import Mesh
from shardcomm.comm.pending import Pending
from shardcomm.copy.plan import CopyPlan, Segment
from shardcomm.engine.engine import Engine
from shardcomm.engine.sharding import fully_shard
from shardcomm.interop import backend  # registers itself with torch.distributed
from shardcomm.interop.collectives import all_gather_into_tensor, reduce_scatter_tensor
from shardcomm.layout.layout import Block, Layout, ParamSpec
from shardcomm.optim.adamw import AdamW
from shardcomm.optim.average import ExponentialMovingAverage
from shardcomm.optim.grad_scaler import GradScaler
from shardcomm.parameter.sharded_parameter import ShardedParameter
from shardcomm.planner.planner import Plan
from shardcomm.process.launch import RankError, launch
from shardcomm.process.stack_dumps import enable_stack_dumps
from shardcomm.schedule.schedule import Schedule
from shardcomm.schedule.strategy import STRATEGIES, Strategy
from shardcomm.stream.work import Work
from shardcomm.unit.mixed_precision import MixedPrecision
from shardcomm.unit.policy import Policy

__version__ = _version("shardcomm")

__all__ = [
    "STRATEGIES",
    "AdamW",
    "Block",
    "Bucket",
    "CheckpointError",
    "Checkpoints",
    "CommError",
    "Communicator",
    "CopyPlan",
    "CudaError",
    "Engine",
    "Event",
    "ExponentialMovingAverage",
    "GradScaler",
    "Layout",
    "Mesh",
    "MixedPrecision",
    "ParamSpec",
    "Pending",
    "Plan",
    "Policy",
    "RankError",
    "Receipt",
    "Schedule",
    "Segment",
    "ShardedParameter",
    "Strategy",
    "Stream",
    "Work",
    "all_gather_into_tensor",
    "backend",
    "enable_stack_dumps",
    "fully_shard",
    "launch",
    "reduce_scatter_tensor",
]
