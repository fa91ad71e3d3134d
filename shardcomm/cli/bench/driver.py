"""The run, on every rank: each operation, on each size or layer, over each transport in turn.

All transports take their turn at a size before the next size comes, so that other work of the machine affects them
alike.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from tqdm import tqdm

from shardcomm._C import CommError
from shardcomm.cli.bench import table
from shardcomm.cli.bench.gpu_link import nominal_link
from shardcomm.cli.bench.layers import LAYER_OPERATIONS, LayerOperation
from shardcomm.cli.bench.measure import AnyOperation, Workload, measure
from shardcomm.cli.bench.operations import OPERATIONS
from shardcomm.cli.bench.options import BenchOptions, Layer
from shardcomm.cli.bench.results import Results, Section
from shardcomm.cli.bench.timing import overhead
from shardcomm.cli.bench.transports import Ranks, Unusable, check_operation, open_transport
from shardcomm.comm.communicator import Communicator
from shardcomm.meeting.launchers import launched

Planned: TypeAlias = tuple[AnyOperation, Sequence[Workload], list[tuple[Section, Ranks]]]

_DEVICE_LINE_BYTES = 200


def benchmark(options: BenchOptions) -> Results:
    """Measures, as this rank of the group that the environment describes; rank 0 prints, and has the results."""
    with Communicator.from_env(deadline_s=options.deadline_s, device="cpu") as control:
        return _Run(options, control).run()


class _Run:
    def __init__(self, options: BenchOptions, control: Communicator) -> None:
        self.options = options
        self.control = control
        link = nominal_link() if torch.cuda.device_count() > 1 else None
        self.results = Results(control.size, overhead(options), link)
        # tqdm's default is a lock between processes, a semaphore that a killed rank would leave behind.
        tqdm.set_lock(threading.RLock())
        self.out = sys.stderr if options.to_stderr else sys.stdout

    def run(self) -> Results:
        self.say(table.preamble(self.options, _devices(self.control)))
        if self.results.link is not None:
            self.say([f"# Link between GPUs: {self.results.link} (nominal)"])
        opened = self.open_transports()
        plan = [self.planned(name, opened) for name in self.options.operations]
        with tqdm(
            total=sum(len(workloads) * len(sections) for _, workloads, sections in plan),
            disable=self.control.rank != 0 or not sys.stderr.isatty(),
            leave=False,
        ) as bar:
            for operation, workloads, sections in plan:
                self.operation(operation, workloads, sections, bar)
        self.say(table.ratios(self.results.sections))
        self.say(["#", table.overhead(self.results)])
        self.control.barrier()  # no rank uses the transports any more
        for ranks in reversed(opened):  # torch's default group comes first, and must be closed last
            ranks.close()
        return self.results

    def open_transports(self) -> list[Ranks]:
        opened = []
        for name in self.options.transports:
            try:
                opened.append(open_transport(name, self.control, self.options))
            except Unusable as reason:
                self.skip(f"transport {name}", str(reason))
        return opened

    def planned(self, name: str, opened: list[Ranks]) -> Planned:
        """An operation, the workloads on which it is measured, and the transports over which it is."""
        operation = (OPERATIONS | LAYER_OPERATIONS)[name]
        on_layers = isinstance(operation, LayerOperation)
        workloads = self.options.layers if on_layers else self.options.sizes.all()
        sections = []
        for ranks in opened[:1] if operation.is_local else opened:
            try:
                check_operation(name, ranks.transport, self.options)
            except Unusable as reason:
                self.skip(f"{name} over {ranks.transport}", str(reason))
                continue
            section = Section(
                operation=name,
                transport="memory" if operation.is_local else ranks.transport,
                device=ranks.device.type,
                dtype=self.options.dtype,
                redop=operation.redop(self.options),
                root=operation.root,
            )
            sections.append((section, ranks))
        return operation, workloads, sections

    def operation(
        self,
        operation: AnyOperation,
        workloads: Sequence[Workload],
        sections: list[tuple[Section, Ranks]],
        bar: tqdm[None],
    ) -> None:
        """Measures one operation, and prints its tables. The first transport's rows are printed as they come."""
        if not sections:
            return
        first = sections[0][0]
        self.say(table.opening(first))
        for workload in workloads:
            label = workload.name if isinstance(workload, Layer) else f"{workload} B"
            for section, ranks in sections:
                bar.set_description(f"{operation.name}: {section.transport}, {label}")
                overhead_s = self.results.overhead_s
                row = ranks.run(partial(measure, operation, workload, self.options, overhead_s))
                bar.update()
                if row is not None:
                    section.rows.append(row)
                if section is first:
                    too_small = f"# {label}: less than 16 B a rank"
                    self.say(table.lines(section, row) if row else [too_small])
        for section, _ in sections:
            if section is not first:
                rows = [table.lines(section, row) for row in section.rows]
                self.say([*table.opening(section), *chain.from_iterable(rows)])
            self.say(table.closing(section, self.options))
            self.results.sections.append(section)

    def skip(self, what: str, reason: str) -> None:
        self.results.skipped.append((what, reason))
        self.say([f"# Skipped {what}: {reason}"])

    def say(self, lines: Sequence[str]) -> None:
        """Prints on rank 0; raises CommError on all ranks if that is not possible."""
        if self.control.rank != 0 or not lines:
            return
        try:
            tqdm.write("\n".join(lines), file=self.out)
            self.out.flush()
        except OSError as error:
            reason = f"the table could not be written: {error.strerror}"
            self.control.abort(reason)
            raise CommError(reason) from error


def _devices(control: Communicator) -> list[str]:
    """A line for each rank, as nccl-tests has it."""
    gpu = launched().local_rank or 0
    has_gpu = gpu < torch.cuda.device_count()
    name = torch.cuda.get_device_name(gpu) if has_gpu else platform.machine() + " CPU"
    line = (
        f"#  Rank {control.rank:2d} Group  0 Pid {os.getpid():6d} on {platform.node():>10} device "
        f"{gpu if has_gpu else 0:2d} {name}"
    )
    mine = torch.frombuffer(
        bytearray(line.encode()[:_DEVICE_LINE_BYTES].ljust(_DEVICE_LINE_BYTES)), dtype=torch.uint8
    )
    lines = torch.empty(control.size, _DEVICE_LINE_BYTES, dtype=torch.uint8)
    control.all_gather(lines, mine)
    return [bytes(line.tolist()).decode().rstrip() for line in lines]
