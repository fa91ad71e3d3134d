"""The options that say in which types a model that is not there yet computes and communicates."""

from __future__ import annotations

import argparse
from typing import Literal

import torch

from shardcomm.copy.blocks import BlockFormat, ReduceFormat
from shardcomm.unit.mixed_precision import MixedPrecision


def add_precision(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Adds the options to a command; `dtype` is the default of --dtype."""
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default=dtype,
                        help="dtype to compute and communicate in; shards stay fp32")  # fmt: skip
    parser.add_argument("--gather-format", choices=["mxint8", "mxfp8"],
                        help="the block format in which gathers send parameters of two dims and more")  # fmt: skip


def add_reduce_format(parser: argparse.ArgumentParser) -> None:
    """Adds the format of sums between hosts, on which a model's memory does not depend."""
    parser.add_argument("--reduce-format", choices=["bf16", "mxint8", "mxfp8"],
                        help="in what sums of gradients cross between CPU hosts, with --strategy full_shard or "
                             "shard_grad_op (default: fp32)")  # fmt: skip


def precision_of(
    args: argparse.Namespace, reduce_format: Literal["bf16", "mxint8", "mxfp8"] | None = None
) -> MixedPrecision:
    """What the options say, beside those of the model; ValueError if they do not fit each other."""
    if args.gather_format is not None and args.params is not None:
        raise ValueError(
            f"--gather-format is {args.gather_format!r}; it needs --model: only parameters of two dims and more are "
            "coded, and of --params the shapes are not known"
        )
    half = torch.bfloat16 if args.dtype == "bf16" else None
    code = None if args.gather_format is None else BlockFormat(args.gather_format)
    crosses: ReduceFormat | None = None
    if reduce_format is not None:
        crosses = torch.bfloat16 if reduce_format == "bf16" else BlockFormat(reduce_format)
    return MixedPrecision(
        param_dtype=half,
        reduce_dtype=half,
        gather_format=code,
        reduce_format=crosses,
    )
