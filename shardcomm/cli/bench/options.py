"""The options of the command line, checked: sizes, types, and the rest of `BenchOptions`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardcomm.comm.words import ReduceOp
from shardcomm.files.json_file import Value, read_json
from shardcomm.models.shapes import SHAPES, Shapes

# The types by nccl-tests' names.
DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
DEFAULT_SIZE = "32M"
_MOST_ELEMENTS = 1 << 50  # of a parameter
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Sizes:
    """The sizes from `first` to `last` bytes. Each is `factor` times the one before or, with factor 1, `step` more."""

    first: int
    last: int
    step: int
    factor: int

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise ValueError(
                f"-b is {_said(self.first)} and -e is {_said(self.last)}; the first size must be at most the last"
            )
        if self.first == 0 and self.factor > 1:
            raise ValueError(
                f"-b is 0 and -f is {self.factor}; a factor needs a first size above 0"
            )

    def all(self) -> Sequence[int]:
        """All sizes, in bytes."""
        if self.factor == 1:
            return range(self.first, self.last + 1, self.step)
        sizes = [self.first]
        while sizes[-1] * self.factor <= self.last:
            sizes.append(sizes[-1] * self.factor)
        return sizes


def _said(nbytes: int) -> str:
    return f"{nbytes} bytes" + " (the default)" * (nbytes == size_bytes(DEFAULT_SIZE))


@dataclass(frozen=True)
class Layer:
    """One layer: its name, and the names and shapes of its parameters."""

    name: str
    shapes: Shapes


@dataclass(frozen=True)
class BenchOptions:
    """The options that every rank gets; the same on each. The command's help explains them."""

    operations: tuple[str, ...]
    transports: tuple[str, ...]
    sizes: Sizes
    layers: tuple[Layer, ...]
    dtype: str
    redop: ReduceOp
    iterations: int
    warmups: int
    aggregate: int
    checks: int
    average: int
    cpu_time: bool
    graph_launches: int
    communication_memory: bool
    statistics: bool
    deadline_s: float
    ranks: int
    to_stderr: bool
    """Whether the table goes to stderr, because --json or --csv writes to stdout."""


def size_bytes(text: str) -> int:
    """The type of an option that takes a size, as nccl-tests reads it: 1000, 64K, 1.5M, 2G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text, re.IGNORECASE)
    if match is None or float(match[1]) * _UNITS[match[2].upper()] > 1 << 50:
        raise argparse.ArgumentTypeError(
            f"{text!r}; it must be a number of bytes, at most 1 PiB, as in 512, 64K, 1.5M or 2G"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def step_bytes(text: str) -> int:
    """The type of an option that takes a size of at least one byte."""
    if (step := size_bytes(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be at least 1 byte")
    return step


def layers(text: str) -> tuple[Layer, ...]:
    """The type of --shapes: names such as "gpt2,llama3-8b", or files that hold the shapes of one layer."""
    return tuple(_layer(name) for name in text.split(","))


def _layer(name: str) -> Layer:
    if name in SHAPES:
        return Layer(name, SHAPES[name].block)
    try:
        found = read_json(
            name, f'one of {", ".join(SHAPES)}, nor one JSON object as {{"weight": [768, 768]}}'
        )
        shapes = {key: _shape(value) for key, value in found.items()}
        if not shapes:
            raise found.wrong("an object with names")
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{name!r} is neither one of {', '.join(SHAPES)} nor a JSON file: {error.strerror}"
        ) from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Layer(name, shapes)


def _shape(value: Value) -> tuple[int, ...]:
    shape = tuple(size.whole(1, _MOST_ELEMENTS) for size in value)
    if not shape or math.prod(shape) > _MOST_ELEMENTS:
        raise value.wrong(f"a list of sizes, with at most {_MOST_ELEMENTS} elements together")
    return shape
