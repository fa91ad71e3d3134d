"""Results in files: JSON has everything, CSV has the figures."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from shardcomm.cli.bench.options import BenchOptions
from shardcomm.cli.bench.results import Results, Section
from shardcomm.cli.bench.timing import Spread
from shardcomm.cli.options import opened
from shardcomm.files.provenance import provenance

VARIANTS = ("out_of_place", "in_place")

# The columns of a spread, empty where single iterations were not timed, which may differ from device to device.
_NO_SPREAD = dict.fromkeys(field.name for field in fields(Spread))


def as_json(options: BenchOptions, results: Results) -> dict[str, Any]:
    """The results as a dict for JSON.

    Times are in seconds, and bandwidths in bytes a second. `shardcomm.cli.bench.results` explains the names.
    """
    return {
        **provenance(" ".join(["shardcomm", *sys.argv[1:]])),
        "options": asdict(options),
        "ranks": results.ranks,
        "overhead_s": results.overhead_s,
        "nominal_link": results.link,
        "wrong": results.wrong,
        "skipped": [{"what": what, "reason": reason} for what, reason in results.skipped],
        "sections": [_section(section) for section in results.sections],
    }


def _section(section: Section) -> dict[str, Any]:
    fits = {"fit": section.fit, "fit_in_place": section.fit_in_place}
    return {
        **asdict(section),
        "mean_busbw": section.mean_busbw,
        **{name: None if fit is None else asdict(fit) for name, fit in fits.items()},
    }


def write_json(path: str, options: BenchOptions, results: Results) -> None:
    """Writes all results as JSON; "-" is stdout."""
    with opened(path) as out:
        json.dump(as_json(options, results), out, indent=1)
        out.write("\n")


def write_csv(path: str, results: Results) -> None:
    """Writes a line for each figure; "-" is stdout. Times are in seconds, and bandwidths in bytes a second."""
    lines = list(_lines(results))
    with opened(path) as out:
        writer = csv.DictWriter(out, list(lines[0]) if lines else [])
        writer.writeheader()
        writer.writerows(lines)


def _lines(results: Results) -> Iterator[dict[str, Any]]:
    for section in results.sections:
        head = asdict(section)
        del head["rows"]
        for row in section.rows:
            for variant, figure in zip(VARIANTS, row.figures(), strict=False):
                found = asdict(figure)
                spread = found.pop("spread") or _NO_SPREAD
                yield {
                    **head,
                    "ranks": results.ranks,
                    "layer": row.layer,
                    "size_bytes": row.size_bytes,
                    "count": row.count,
                    "placement": variant,  # the name that files of earlier versions have
                    "limit": row.limit,
                    **found,
                    **spread,
                }
