"""Types of command-line options. Their errors name what was given and what is accepted."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from shardcomm.files.whole_file import written_whole
from shardcomm.meeting.launchers import Launched, launched

_PICTURES = (".png", ".svg", ".pdf")


class DefaultsFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that shows an option's default, if there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def whole(low: int, high: int) -> Callable[[str], int]:
    """The type of an option that takes a whole number from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"{text!r}; it must be a whole number from {low} to {high}"
            )
        return value

    return parse


def named(text: str) -> str:
    """The type of an option that names a file or a folder. An empty name would be that of the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("''; it must not be empty")
    return text


def positive(text: str) -> float:
    """The type of an option that takes a number above 0, at most 1e9."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a number above 0, at most 1e9")
    return value


def share(text: str) -> float:
    """The type of an option that takes a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be a number from 0 to 1")
    return value


def memory(text: str) -> int:
    """The type of an option that takes a memory size: 40GB, 39.6GiB. Units are powers of 1,000, with an i of 1,024."""
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?)B?|B)", text.strip())
    nbytes = math.inf
    if parsed is not None:
        base = 1024 if parsed[3] else 1000
        nbytes = float(parsed[1]) * base ** " KMGT".index((parsed[2] or " ").upper())
    if nbytes > 1e15:
        raise argparse.ArgumentTypeError(
            f"{text!r}; it must be a size with its unit, as 40GB, 80GiB or 512MB, at most 1000TB"
        )
    return int(nbytes)


def launched_for(parser: argparse.ArgumentParser, ranks: int | None) -> Launched:
    """This process among those that its launcher started; their number must be --ranks, if that is given."""
    try:
        own = launched()
    except ValueError as error:
        parser.error(str(error))
    if own.launcher and ranks not in (None, own.size):
        parser.error(f"--ranks is {ranks}, but {own.launcher} started {own.size}")
    return own


def picture(text: str) -> str:
    """The type of an option that takes a picture's file, of a kind that matplotlib writes; matplotlib must be there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("it needs matplotlib: pip install 'shardcomm[plot]'")
    if Path(text).suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}; it must end in {', '.join(_PICTURES)}")
    return text


def can_write(path: str | None) -> bool:
    """Whether `path` (- for stdout, None for nowhere) can be written. Nothing is opened or made for that."""
    if path is None or path == "-":
        return True
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        folder = os.path.dirname(os.path.realpath(path))  # of a link, where the file will be
        return os.path.basename(path) != "" and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False
    return not stat.S_ISDIR(mode) and os.access(path, os.W_OK)


def check_outputs(parser: argparse.ArgumentParser, args: argparse.Namespace, *options: str) -> None:
    """Refuses `options` that name what cannot be written, or one file twice; json and csv may be -, for stdout."""
    named: dict[str, str] = {}
    for option in options:
        path = getattr(args, option)
        to_stdout = option in ("json", "csv")
        if not can_write(path) or (path == "-" and not to_stdout):
            accepted = "a file that can be written" + ", or -" * to_stdout
            parser.error(f"--{option} is {path!r}; it must be {accepted}")
        if path in named:
            parser.error(
                f"--{named[path]} and --{option} are both {path}; each must be a file of its own"
            )
        if path is not None:
            named[path] = option


@contextmanager
def opened(path: str) -> Iterator[TextIO]:
    """A context that gives the file `path` to write into (- for stdout); line ends stay as they are written.

    If an OSError ends it, the error names the file, and no partial file is left.
    """
    if path == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    with written_whole(path), open(path, "w", newline="") as file:
        yield file
