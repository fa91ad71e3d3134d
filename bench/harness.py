"""What the comparison scripts share: medians with their spread, one table, --json and --check.

Peers are measured in turn within the same rounds (A B C, A B C, ...), so that whatever else the machine does hits all
alike, and what is reported are ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardcomm.cli.options import can_write
from shardcomm.files.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Times:
    """Seconds of each round."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def quantile(self, fraction: float) -> float:
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, round(fraction * (len(ordered) - 1)))]

    def __str__(self) -> str:
        low, high = self.quantile(0.1), self.quantile(0.9)
        unit, scale = ("ms", 1e3) if self.median >= 1e-3 else ("us", 1e6)
        return f"{self.median * scale:.2f} {unit} ({low * scale:.2f}-{high * scale:.2f})"


@dataclass(frozen=True)
class Bound:
    """A figure and what it must be: at least, or at most, `limit`."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        if self.at_least is not None and self.value < self.at_least:
            return False
        return self.at_most is None or self.value <= self.at_most

    def __str__(self) -> str:
        wanted = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        verdict = "ok" if self.holds else "FALLS SHORT"
        return f"{self.name}: {self.value:.3g} (wanted {wanted}) {verdict}"


@dataclass
class Report:
    """A table, the figures behind it, and the bounds that --check holds them to."""

    columns: Sequence[str]
    title: str | None = None  # None: the first line of the script's description
    rows: list[list[str]] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    bounds: list[Bound] = field(default_factory=list)

    def row(self, *cells: object) -> None:
        self.rows.append([str(cell) for cell in cells])

    def print(self, out: object = None) -> None:
        table = [list(self.columns), *self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.columns))]
        for row in table:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip(), file=out or sys.stdout)  # type: ignore[arg-type]
        print(file=out or sys.stdout)  # type: ignore[arg-type]
        for bound in self.bounds:
            print(bound, file=out or sys.stdout)  # type: ignore[arg-type]

    def finish(self, args: argparse.Namespace) -> None:
        """Prints, writes the JSON, and ends the process with 1 if --check found a figure short."""
        self.print(sys.stderr if args.json == "-" else None)
        if args.json:
            text = json.dumps(self.as_json(self.title or args.title), indent=1)
            if args.json == "-":
                print(text)
            else:
                Path(args.json).write_text(text + "\n")
        short = [str(bound) for bound in self.bounds if not bound.holds]
        if args.check and short:
            sys.exit("\n".join(["check failed:", *short]))

    def as_json(self, title: str) -> dict[str, object]:
        return {
            **provenance(" ".join(["python", *sys.argv])),
            "commit": commit(),
            "title": title,
            "table": [list(self.columns), *self.rows],
            "figures": self.figures,
            "bounds": [asdict(bound) | {"holds": bound.holds} for bound in self.bounds],
        }


def commit() -> str | None:
    """The checkout's commit, with "-dirty" if files differ from it; None without Git, as in an archive."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        ended = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return ended.stdout.strip() or None


def arguments(description: str) -> argparse.ArgumentParser:
    """The options all comparison scripts have."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", type=_output, metavar="FILE", help="write the figures there; - for stdout"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a figure falls short of its bound"
    )
    parser.set_defaults(title=description.splitlines()[0])
    return parser


def _output(path: str) -> str:
    """The type of --json. It is checked before anything is measured."""
    if not can_write(path):
        raise argparse.ArgumentTypeError(f"{path!r}; it must be a file that can be written, or -")
    return path
