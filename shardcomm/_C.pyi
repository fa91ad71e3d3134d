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
    exact_sum = ...
    exact_avg = ...

class Use(Enum):
    gather = ...
    reduce = ...

class CommError(RuntimeError):
    """A group of ranks cannot go on: one died, came late, or called something else. It is raised on every rank.

    People read its text, and programs read its fields. After it the communicator only raises.

    Attributes:
        kind: "died", "late", "mismatch" (ranks called different collectives, or wait for each other), "closed",
            "aborted" (a rank gave up, by an exception or by `abort`), or "backend" (the transport, the operating
            system, or something that set-up needs refused).
        rank: The rank whose fault it is; None where it is no single rank's fault, or where that is not known.
        operation: The collective that this rank was in, "all_gather" for instance; None: it was in none.
        sequence: The number of that collective, which the text gives as "#147"; None: it was in none.
        reporter: The rank that noticed; None where that is not known.

    Example:
        ```py
        try:
            comm.all_gather(recv, send)
        except CommError as error:
            if error.kind == "died":
                restart_without(error.rank)
        ```
    """

    kind: Literal["died", "late", "mismatch", "closed", "aborted", "backend"]
    rank: int | None
    operation: str | None
    sequence: int | None
    reporter: int | None

class CudaError(RuntimeError):
    """CUDA or NCCL refused, or is not there. The text says which call refused, and why."""

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

class BlockCode:
    mxint8: BlockCode
    mxfp8: BlockCode

class Rounding:
    nearest: Rounding
    stochastic: Rounding

class BlockFormat:
    def __init__(self, code: BlockCode, block: int, rounding: Rounding) -> None: ...

def wire_bytes(format: BlockFormat, elements: int) -> int: ...
def encode_blocks(
    format: BlockFormat,
    segments: Sequence[tuple[int, int, int]],
    dtype: DType,
    wire: int,
    bytes: int,
    seed: int,
    stats: int,
    threads: int,
    device: int,
    stream: Stream | None,
) -> None: ...
def decode_blocks(
    format: BlockFormat,
    wire: int,
    bytes: int,
    segments: Sequence[tuple[int, int, int]],
    dtype: DType,
    threads: int,
    device: int,
    stream: Stream | None,
) -> None: ...
def decode_sum(
    format: BlockFormat,
    wires: int,
    parts: int,
    dst: int,
    count: int,
    dtype: DType,
    scale: float,
    accumulate: bool,
    nonfinite: int,
    threads: int,
    device: int,
    stream: Stream | None,
) -> None: ...
def walk_encode_blocks(
    format: BlockFormat,
    segments: Sequence[tuple[int, int, int]],
    dtype: DType,
    wire: int,
    bytes: int,
    seed: int,
    stats: int,
    teams: int,
    most_segments: int,
) -> None: ...
def walk_decode_blocks(
    format: BlockFormat,
    wire: int,
    bytes: int,
    segments: Sequence[tuple[int, int, int]],
    dtype: DType,
    teams: int,
    most_segments: int,
) -> None: ...
def walk_decode_sum(
    format: BlockFormat,
    wires: int,
    parts: int,
    dst: int,
    count: int,
    dtype: DType,
    scale: float,
    accumulate: bool,
    nonfinite: int,
    teams: int,
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
    """A point in a stream's work. It fires when all work before that point has finished, or has failed.

    `Stream.record` makes it.
    """

    def query(self) -> bool:
        """Whether the event has fired. It never blocks and never raises.

        For an event of a CUDA stream that is being captured, it is True once the capture has ended.
        """

    def wait(self) -> None:
        """Blocks the host until the event has fired. Ctrl-C ends the wait.

        Raises:
            RuntimeError: The event could never fire, since the wait is in a callable of its own stream before it, or of
                a stream for which that stream waits.
            Exception: What the stream's work before the event has raised.
        """

    def seconds_since(self, earlier: Event) -> float:
        """The seconds from `earlier` to this event.

        Args:
            earlier: An event of the same kind of stream. Both must have fired; on a GPU, both must be recorded with
                `timed=True`.
        """

class Stream:
    """Runs the work that it is given, in order: collectives, copies and Python callables.

    `Stream()` is a worker thread of this process, for communication on a CPU. `Stream.cuda` and `Stream.from_cuda` are
    streams of a GPU. `Stream.caller` runs everything at once in the calling thread.

    Example:
        ```python
        stream = shardcomm.Stream()
        stream.enqueue(lambda: print("on the worker thread"))
        stream.record().wait()
        ```
    """

    def __init__(self) -> None:
        """Starts a worker thread, which ends with this object, after the work that was queued."""

    @staticmethod
    def caller() -> Stream:
        """A stream whose work runs at once, in the thread that queues it, and whose events have fired."""

    @staticmethod
    def cuda(device: int) -> Stream:
        """A new stream of a GPU, which does not synchronise with the default stream.

        Args:
            device: The GPU's number.

        Raises:
            CudaError: CUDA refused, or is not there.
            ValueError: This process has no such GPU.
        """

    @staticmethod
    def from_cuda(device: int, handle: int) -> Stream:
        """A CUDA stream that belongs to somebody else, and must live longer than this object.

        Args:
            device: The GPU's number.
            handle: The cudaStream_t, such as `torch.cuda.Stream.cuda_stream`.

        Raises:
            CudaError: CUDA is not there.
            ValueError: This process has no such GPU.
        """

    @property
    def handle(self) -> int:
        """The cudaStream_t; 0 on a CPU."""

    @property
    def capturing(self) -> bool:
        """Whether the stream is being captured in a CUDA graph, so that nothing runs now."""

    def enqueue(self, function: Callable[[], object]) -> None:
        """Runs a callable after all earlier work.

        A worker thread runs it later. If a callable raises there, later work is dropped, and the events
        behind it raise the same exception. On a GPU, and in `caller()`, it runs at once: what it launches is ordered by
        the CUDA stream.

        Args:
            function: What to call, without arguments.

        Raises:
            RuntimeError: The process is ending.
        """

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copies memory after all earlier work. Both ends must stay valid until the copy is done.

        Args:
            dst: The address to write to.
            src: The address to read from. On a CUDA stream both are of its device or of the host; the caller may have
                to wait where host memory is not pinned.
            nbytes: How many bytes.
        """

    def record(self, timed: bool = ...) -> Event:
        """An event at this point of the stream.

        Args:
            timed: Whether `seconds_since` will be asked of it. On a CUDA stream such an event costs a little more, and
                cannot be recorded in a capture; elsewhere every event is timed.
        """

    def wait(self, event: Event) -> None:
        """Makes later work of this stream start after `event`. Only `caller()` blocks for that."""

    def synchronize(self) -> None:
        """Blocks the host until all work that was queued has finished; raises what that work has raised."""

class Memory:
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, object]: ...
    def as_dlpack(self) -> object: ...  # a capsule for torch.utils.dlpack

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def exact_sums(self) -> bool: ...
    @property
    def codes_reduces(self) -> bool: ...
    def allocate(self, nbytes: int, use: Use) -> Memory: ...
    def sharers(self, buffer: int, nbytes: int) -> tuple[int, int]: ...
    def name_tag(self, tag: int, name: str) -> None: ...
    def abort(self, reason: str) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...
    def receipts(self) -> list[tuple[str, int, str, str, str]]: ...
    def pending(self) -> list[CorePending]: ...

class TensorCalls:
    def __init__(self, tensor: type) -> None: ...
    def all_gather(self, comm: Communicator, recv: object, send: object) -> bool: ...
    def reduce_scatter(self, comm: Communicator, recv: object, send: object, op: RedOp) -> bool: ...
    def all_reduce(self, comm: Communicator, buffer: object, op: RedOp) -> bool: ...
    def broadcast(self, comm: Communicator, buffer: object, root: int) -> bool: ...

CorePending = tuple[int, int, str, str, int, float | None, tuple[int, ...]]

class GroupReport:
    @property
    def ranks(self) -> list[tuple[int, int, int, bool, bool]]: ...
    @property
    def hosts(self) -> int: ...
    @property
    def host(self) -> int: ...
    @property
    def failure(self) -> str: ...
    @property
    def pending(self) -> list[CorePending]: ...

group_label: str

def read_group(fd: int) -> GroupReport: ...

end_of_stacks: bytes

def has_handler(signal: int) -> bool: ...
def dump_then(signal: int, register_dump: Callable[[], object], fd: int = ...) -> None: ...

class BoundCollective:
    @staticmethod
    def all_gather(
        comm: Communicator,
        send: int,
        send_dtype: DType,
        recv: int,
        recv_dtype: DType,
        parts: int | tuple[int, ...],
        tag: int,
    ) -> BoundCollective: ...
    @staticmethod
    def reduce_scatter(
        comm: Communicator,
        send: int,
        dtype: DType,
        recv: int,
        recv_dtype: DType,
        scale: float,
        accumulate: bool,
        parts: int | tuple[int, ...],
        op: RedOp,
        tag: int,
        nonfinite: int,
    ) -> BoundCollective: ...
    @staticmethod
    def all_reduce(
        comm: Communicator, buffer: int, dtype: DType, count: int, op: RedOp, tag: int
    ) -> BoundCollective: ...
    @staticmethod
    def broadcast(
        comm: Communicator, buffer: int, dtype: DType, count: int, root: int
    ) -> BoundCollective: ...
    @staticmethod
    def barrier(comm: Communicator, tag: int) -> BoundCollective: ...
    @staticmethod
    def sharing(comm: Communicator, buffer: int, nbytes: int, tag: int) -> BoundCollective: ...
    def __call__(self) -> None: ...
    def enqueue(self, stream: Stream) -> None: ...
    def queue(self, stream: Stream, after: Stream | None) -> Event: ...
    def repeat(self, times: int) -> None: ...

class Coding:
    def __init__(self, blocks: BlockFormat | None, stats: int) -> None: ...

class BoundReduction:
    def __init__(
        self,
        comm: Communicator,
        send: int,
        dtype: DType,
        recv_dtype: DType,
        parts: int | tuple[int, ...],
        op: RedOp,
        tag: int,
        coding: Coding | None,
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

def make_local_group(
    size: int, deadline_s: float, device: int = ..., exact_sums: bool = ...
) -> list[Communicator]: ...
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
    def attach(self, deadline_s: float, exact_sums: bool = ...) -> Communicator: ...

def make_shm(address: str, rank: int, size: int, deadline_s: float) -> Communicator: ...
def make_hosts(
    on_host: Communicator, sockets: Sequence[int], host: int, hosts: int
) -> Communicator: ...

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
