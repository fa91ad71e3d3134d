"""The options that name a model of which only the shapes are needed."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import nn

from shardcomm.cli.options import whole
from shardcomm.models.gpt import GPT, heads_of
from shardcomm.models.shapes import SHAPES, equal_blocks


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a command."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", choices=["gpt", *SHAPES],
                       help="the model; gpt is the one that `shardcomm train` trains")  # fmt: skip
    model.add_argument("--params", type=_params, metavar="N",
                       help="a model of N parameters in equal blocks, for example 7e9")  # fmt: skip
    parser.add_argument("--layers", type=whole(1, 10**4),
                        help="number of blocks (default: the model's own; 6 for gpt, 32 for --params)")  # fmt: skip
    parser.add_argument("--width", type=whole(1, 2**16), help="width of gpt (default: 256)")


def model_of(args: argparse.Namespace, context: int) -> nn.Module:
    """The model that the options name, on the meta device; ValueError if they do not fit each other.

    `context` is that of gpt, which has a position for each token of it.
    """
    if args.width is not None and args.model != "gpt":
        raise ValueError("--width is for --model gpt; the other models have theirs")
    if args.model == "gpt":
        width = args.width or 256
        check_width(width)
        with torch.device("meta"):
            return GPT(width, args.layers or 6, context)
    if args.params is not None:
        return equal_blocks(args.params, args.layers or 32).on_meta()
    shapes = SHAPES[args.model]
    return replace(shapes, layers=args.layers or shapes.layers).on_meta()


def check_width(width: int) -> None:
    """ValueError unless the heads of a gpt of this width are equally wide."""
    heads = heads_of(width)
    if width % heads:
        raise ValueError(f"--width is {width}; it must be a multiple of its {heads} heads")


def attention_of(args: argparse.Namespace, context: int) -> int:
    """The operations that a token takes in each block's forward, beside those in the matrices of `model_of`.

    That is causal attention. A block of --params is a matrix of which only the number of elements is known.
    """
    params: int | None = args.params
    if params is not None:
        return 2 * (params // (args.layers or 32))
    width: int = args.width or 256 if args.model == "gpt" else SHAPES[args.model].width
    return 2 * context * width


def _params(text: str) -> int:
    """The type of --params: 7e9, or 7000000000."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (1 <= value <= 1e15 and value == int(value)):
        raise argparse.ArgumentTypeError(
            f"{text!r}; it must be a whole number above 0, at most 1e15, as 7e9"
        )
    return int(value)
