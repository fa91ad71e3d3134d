"""The compiled core: raw addresses in, raw addresses out. See csrc/include/shardcomm for the contracts."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import ClassVar, Literal

class DType(Enum):
    u8 = ...
    i32 = ...
    i64 = ...
    f16 = ...
    bf16 = ...
    f32 = ...
    f64 = ...

class RedOp(Enum):
    sum = ...
    avg = ...
    max = ...
    min = ...

class Use(Enum):
    gather = ...
    reduce = ...

class CommError(RuntimeError):
    """A group of ranks cannot go on: one died, came late, or called something else; it raises on every rank.

    Attributes:
        kind: "died", "late", "mismatch" (ranks called different collectives, or wait for each other), "closed",
            "aborted" (a rank gave up, by an exception or by `abort`), or "backend": the transport, the operating
            system, or what is needed at set-up refused.
        rank: the rank whose fault it is; None where it is no single rank's, or not known whose.
        operation: the collective that this rank was in, "all_gather" for instance; None: it was in none.
        sequence: the number of that collective, which the text gives as "#147"; None as `operation`.
        reporter: the rank that noticed; None where nobody says.
    """

    kind: Literal["died", "late", "mismatch", "closed", "aborted", "backend"]
    rank: int | None
    operation: str | None
    sequence: int | None
    reporter: int | None

class CudaError(RuntimeError): ...

class CudaStatus:
    @property
    def built(self) -> bool: ...
    @property
    def available(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def devices(self) -> int: ...
    @property
    def runtime_version(self) -> int: ...
    @property
    def driver_version(self) -> int: ...

def cuda_status() -> CudaStatus: ...

cuda_built: bool
host_device: int

def plan_layout(
    params: Sequence[tuple[int, int, int]], world_size: int, align_elements: int
) -> tuple[int, list[int], list[int]]: ...

_Fields = tuple[int, int, int, int, int, int, int, int]
# src, dst, src_offset, src_pitch, dst_offset, dst_pitch, rows, cols

class CopyPlan:
    def __init__(
        self, segments: Sequence[Sequence[int]], src_dtype: DType, dst_dtype: DType
    ) -> None: ...
    @property
    def segments(self) -> list[_Fields]: ...
    @property
    def tiles(self) -> list[_Fields]: ...
    @property
    def src_dtype(self) -> DType: ...
    @property
    def dst_dtype(self) -> DType: ...
    @property
    def src_extents(self) -> list[int]: ...
    @property
    def dst_extents(self) -> list[int]: ...
    @property
    def num_sources(self) -> int: ...
    @property
    def num_destinations(self) -> int: ...
    @property
    def elements(self) -> int: ...

class BoundCopy:
    def __init__(
        self,
        plan: CopyPlan,
        sources: Sequence[int],
        destinations: Sequence[int],
        threads: int = ...,
        device: int = ...,
    ) -> None: ...
    def set_operands(self, sources: Sequence[int], destinations: Sequence[int]) -> None: ...
    def run(
        self,
        scale: float = ...,
        accumulate: bool = ...,
        nonfinite: int = ...,
        stream: Stream | None = ...,
    ) -> None: ...

def walk_launches(
    plan: CopyPlan,
    sources: Sequence[int],
    destinations: Sequence[int],
    scale: float,
    accumulate: bool,
    tile_elements: int,
    most_operands: int,
    blocks: int,
    threads: int,
    nonfinite: int = ...,
) -> None: ...
def reduce(
    dst: int,
    dst_dtype: DType,
    scale: float,
    accumulate: bool,
    sources: Sequence[int],
    dtype: DType,
    op: RedOp,
    count: int,
    nonfinite: int = ...,
    divisor: int = ...,
) -> None: ...
def reduce_cuda(
    stream: Stream,
    dst: int,
    dst_dtype: DType,
    scale: float,
    accumulate: bool,
    sources: Sequence[int],
    dtype: DType,
    op: RedOp,
    count: int,
    nonfinite: int = ...,
    divisor: int = ...,
) -> None: ...
def walk_reduce(
    dst: int,
    dst_dtype: DType,
    scale: float,
    accumulate: bool,
    sources: Sequence[int],
    dtype: DType,
    op: RedOp,
    count: int,
    threads: int,
    nonfinite: int = ...,
    divisor: int = ...,
) -> None: ...

class InstructionSet:
    baseline: ClassVar[InstructionSet]
    avx2: ClassVar[InstructionSet]
    avx512: ClassVar[InstructionSet]
    @property
    def name(self) -> str: ...

def instruction_sets() -> list[InstructionSet]: ...
def instruction_set() -> InstructionSet: ...
def use_instruction_set(set: InstructionSet) -> None: ...

class Event:
    def query(self) -> bool: ...
    def wait(self) -> None: ...
    def seconds_since(self, earlier: Event) -> float: ...

class Stream:
    def __init__(self) -> None: ...
    @staticmethod
    def caller() -> Stream: ...
    @staticmethod
    def cuda(device: int) -> Stream: ...
    @staticmethod
    def from_cuda(device: int, handle: int) -> Stream: ...
    @property
    def handle(self) -> int: ...
    @property
    def capturing(self) -> bool: ...
    def enqueue(self, function: Callable[[], object]) -> None: ...
    def copy(self, dst: int, src: int, nbytes: int) -> None: ...
    def record(self, timed: bool = ...) -> Event: ...
    def wait(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...

class Memory:
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transport(self) -> str: ...
    def allocate(self, nbytes: int, use: Use) -> Memory: ...
    def all_gather(
        self,
        send: int,
        send_dtype: DType,
        recv: int,
        recv_dtype: DType,
        parts: int | tuple[int, ...],
        tag: int,
        stream: Stream | None = ...,
    ) -> None: ...
    def reduce_scatter(
        self,
        send: int,
        dtype: DType,
        recv: int,
        recv_dtype: DType,
        scale: float,
        accumulate: bool,
        parts: int | tuple[int, ...],
        op: RedOp,
        tag: int,
        nonfinite: int = ...,
        stream: Stream | None = ...,
    ) -> None: ...
    def all_reduce(
        self,
        buffer: int,
        dtype: DType,
        count: int,
        op: RedOp,
        tag: int = ...,
        stream: Stream | None = ...,
    ) -> None: ...
    def broadcast(
        self, buffer: int, nbytes: int, root: int, stream: Stream | None = ...
    ) -> None: ...
    def barrier(self, tag: int = ..., stream: Stream | None = ...) -> None: ...
    def name_tag(self, tag: int, name: str) -> None: ...
    def abort(self, reason: str) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def receipts(self) -> list[tuple[str, int, str, str, str]]: ...
    def pending(self) -> list[CorePending]: ...

CorePending = tuple[int, int, str, str, int, float | None, tuple[int, ...]]

class GroupReport:
    @property
    def ranks(self) -> list[tuple[int, int, bool, bool]]: ...
    @property
    def failure(self) -> str: ...
    @property
    def pending(self) -> list[CorePending]: ...

group_label: str

def read_group(fd: int) -> GroupReport: ...

end_of_stacks: bytes

def has_handler(signal: int) -> bool: ...
def dump_then(signal: int, register_dump: Callable[[], object], fd: int = ...) -> None: ...

class BoundGather:
    def __init__(
        self,
        comm: Communicator,
        send: int,
        send_dtype: DType,
        recv: int,
        recv_dtype: DType,
        parts: int | tuple[int, ...],
        tag: int,
    ) -> None: ...
    def queue(self, stream: Stream, after: Stream | None) -> Event: ...

class BoundReduce:
    def __init__(
        self,
        comm: Communicator,
        send: int,
        dtype: DType,
        recv_dtype: DType,
        parts: int | tuple[int, ...],
        op: RedOp,
        tag: int,
    ) -> None: ...
    def queue(
        self,
        stream: Stream,
        after: Stream | None,
        recv: int,
        scale: float,
        accumulate: bool,
        nonfinite: int,
    ) -> Event: ...

def make_local_group(size: int, deadline_s: float, device: int = ...) -> list[Communicator]: ...
def own_process() -> tuple[int, int]: ...

class ProcessWatch:
    def __init__(self, pid: int, start: int) -> None: ...
    @property
    def ended(self) -> bool: ...

class ShmSession:
    def __init__(self, size: int, processes: Sequence[tuple[int, int]] = ...) -> None: ...
    @property
    def address(self) -> str: ...

class ShmMember:
    def __init__(self, address: str, rank: int, size: int) -> None: ...
    def attach(self, deadline_s: float) -> Communicator: ...

def make_shm(address: str, rank: int, size: int, deadline_s: float) -> Communicator: ...

class NcclStatus:
    @property
    def available(self) -> bool: ...
    @property
    def path(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def missing(self) -> list[str]: ...

def nccl_status(paths: Sequence[str] = ...) -> NcclStatus: ...
def nccl_unique_id() -> bytes: ...

class CtaPolicy:
    default: CtaPolicy
    efficiency: CtaPolicy
    zero: CtaPolicy

def make_nccl(
    unique_id: bytes,
    rank: int,
    size: int,
    device: int,
    deadline_s: float,
    cta_policy: CtaPolicy = ...,
) -> Communicator: ...
