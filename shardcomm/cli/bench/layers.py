"""The operations of a training step on a layer's parameters: gather and reduce of a Bucket, and packing by CopyPlan.

Shards, and the gradients that are accumulated in them, are float32. -d is the type of full parameters, of backward's
gradients, and of what is sent. The size is the flat buffer's, padding included. The busbw of a copy is half of the
bytes that it reads and writes in a second, so that memcpy's busbw is its bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardcomm.bucket.bucket import Bucket
from shardcomm.cli.bench.case import Case, Collectives, Variant
from shardcomm.cli.bench.options import DTYPES, BenchOptions, Layer
from shardcomm.cli.exact_values import count_wrong, values
from shardcomm.comm.communicator import Communicator
from shardcomm.copy.plan import CopyPlan
from shardcomm.layout.layout import Layout
from shardcomm.layout.param_spec import ParamSpec

MASTER = torch.float32

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class LayerOperation:
    """An operation on a layer.

    Attributes:
        name: The operation's name.
        reduction: The reduction as printed.
        is_local: Whether no rank needs another.
        make: Makes the case from (collectives, layout, type of the full parameters).
        root: The root as printed; -1 for none.
    """

    name: str
    reduction: str
    is_local: bool
    make: Callable[[Collectives, Layout, torch.dtype], Case]
    root: int = -1

    def redop(self, options: BenchOptions) -> str:
        """The reduction as printed."""
        return self.reduction

    def case(self, on: Collectives, options: BenchOptions, layer: Layer) -> Case:
        """The case for `layer`, with its buffers; collective."""
        dtype = DTYPES[options.dtype]
        specs = [ParamSpec(name, shape) for name, shape in layer.shapes.items()]
        return self.make(on, Layout.plan(specs, on.size, itemsize=dtype.itemsize), dtype)


def _tensors(
    layout: Layout, dtype: torch.dtype, rank: int, seed: int, **exact: int
) -> list[torch.Tensor]:
    """Random tensors of the parameters' shapes."""
    sizes = [p.numel for p in layout.placements]
    parts = torch.split(values(sum(sizes), dtype, rank, seed, **exact), sizes)
    return [part.view(p.spec.shape) for part, p in zip(parts, layout.placements, strict=True)]


def _empty(layout: Layout, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(p.spec.shape, dtype=dtype, device=device) for p in layout.placements]


def _copy(targets: Tensors, sources: Tensors) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _count_wrong(results: Tensors, expected: Tensors) -> int:
    return sum(map(count_wrong, results, expected))


def _bucket(on: Collectives, layout: Layout, dtype: torch.dtype) -> Bucket:
    assert isinstance(on, Communicator)
    return Bucket(layout, on, dtype=MASTER, param_dtype=dtype)


def _gather(on: Collectives, layout: Layout, dtype: torch.dtype) -> Case:
    """The gather of a bucket: a cast of the shard, and an all-gather; the parameters are views."""
    bucket = _bucket(on, layout, dtype)
    gathered = Variant(
        fill=lambda seed: bucket.load(_tensors(layout, dtype, 0, seed)),
        run=bucket.all_gather,
        wrong=lambda seed: _count_wrong(bucket.params, _tensors(layout, dtype, 0, seed)),
    )
    size = layout.flat_numel * dtype.itemsize
    return Case(size, layout.shard_numel, (on.size - 1) / on.size, gathered, None)


def _reduce(on: Collectives, layout: Layout, dtype: torch.dtype) -> Case:
    """The reduce of a bucket: a pack, a reduce-scatter, and the accumulation of the mean in the shard's gradient."""
    bucket, ranks = _bucket(on, layout, dtype), on.size
    grads = _empty(layout, dtype, on.device)
    bucket.gradients.show()  # so that the reduces add to them

    def sent_by(rank: int, seed: int) -> list[torch.Tensor]:
        return _tensors(layout, dtype, rank, seed, terms=ranks, divisor=ranks)

    def rows(full: Tensors) -> list[torch.Tensor]:
        pieces = [layout.piece(on.rank, i) for i in range(len(full))]
        return [t[piece.start : piece.stop] for t, piece in zip(full, pieces, strict=True)]

    def accumulated(seed: int) -> list[torch.Tensor]:
        """The gradient's values before the reduce: those of a rank that does not exist."""
        return _tensors(layout, MASTER, ranks, seed)

    def fill(seed: int) -> None:
        _copy(bucket.gradients.rows, rows(accumulated(seed)))
        _copy(grads, sent_by(on.rank, seed))

    def wrong(seed: int) -> int:
        expected = accumulated(seed)
        for rank in range(ranks):
            means = [sent.float() / ranks for sent in sent_by(rank, seed)]  # they are whole numbers
            expected = [a + b for a, b in zip(expected, means, strict=True)]
        return _count_wrong(bucket.gradients.rows, rows(expected))

    size = layout.flat_numel * dtype.itemsize
    reduced = Variant(fill, partial(bucket.reduce_scatter, grads), wrong)
    return Case(size, layout.shard_numel, (ranks - 1) / ranks, reduced, None)


def _copies(on: Collectives, layout: Layout, dtype: torch.dtype, *, packs: bool) -> Case:
    """A copy of float32 tensors into one flat buffer of `dtype`, or back."""
    places = layout.placements
    flat = torch.zeros(layout.flat_numel, dtype=dtype, device=on.device)
    parts = [flat[p.offset : p.offset + p.numel].view(p.spec.shape) for p in places]
    tensors = _empty(layout, MASTER, on.device)
    sizes, offsets = [p.numel for p in places], [p.offset for p in places]
    if packs:
        bound = CopyPlan.pack(sizes, offsets, MASTER, dtype).bind(tensors, [flat])
    else:
        bound = CopyPlan.unpack(sizes, offsets, dtype, MASTER).bind([flat], tensors)
    sources, results = (tensors, parts) if packs else (parts, tensors)
    copied = Variant(
        fill=lambda seed: _copy(sources, _tensors(layout, dtype, on.rank, seed)),
        run=bound.run,
        wrong=lambda seed: _count_wrong(results, _tensors(layout, dtype, on.rank, seed)),
    )
    bus_factor = (MASTER.itemsize + dtype.itemsize) / 2 / dtype.itemsize
    return Case(layout.flat_numel * dtype.itemsize, layout.flat_numel, bus_factor, copied, None)


LAYER_OPERATIONS = {
    operation.name: operation
    for operation in (
        LayerOperation("gather", reduction="none", is_local=False, make=_gather),
        LayerOperation("reduce", reduction="avg", is_local=False, make=_reduce),
        LayerOperation("pack", reduction="none", is_local=True, make=partial(_copies, packs=True)),
        LayerOperation(
            "unpack", reduction="none", is_local=True, make=partial(_copies, packs=False)
        ),
    )
}
