"""shardcomm moves model shards between ranks, fast.

From the bottom up, each usable on its own: `Layout` (where every element lives), `CopyPlan` (pack and unpack),
`Communicator` (collectives), `Bucket` (a unit's shard and buffers), `Schedule` (what happens when), and
`fully_shard` (an FSDP engine over all of them).
"""

from importlib.metadata import version as _version

from shardcomm import backend  # registers itself with torch.distributed
from shardcomm._C import CommError, CudaError, Event, Stream
from shardcomm.adamw import AdamW
from shardcomm.average import ExponentialMovingAverage
from shardcomm.bucket import Bucket
from shardcomm.checkpoints import CheckpointError, Checkpoints
from shardcomm.collectives import all_gather_into_tensor, reduce_scatter_tensor
from shardcomm.communicator import Communicator, Receipt
from shardcomm.copy_plan import CopyPlan, Segment
from shardcomm.engine import Engine
from shardcomm.grad_scaler import GradScaler
from shardcomm.launch import RankError, launch
from shardcomm.layout import Block, Layout, ParamSpec
from shardcomm.mesh import Mesh
from shardcomm.mixed_precision import MixedPrecision
from shardcomm.pending import Pending
from shardcomm.planner import Plan
from shardcomm.policy import Policy
from shardcomm.schedule import Schedule
from shardcomm.sharded_parameter import ShardedParameter
from shardcomm.sharding import fully_shard
from shardcomm.stack_dumps import enable_stack_dumps
from shardcomm.strategy import STRATEGIES, Strategy
from shardcomm.work import Work

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
