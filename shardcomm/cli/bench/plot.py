"""Draws busbw over size, both logarithmic: a picture for each operation, a line for each transport, and the limit."""

from __future__ import annotations

from shardcomm.cli.bench.results import Results
from shardcomm.files.whole_file import written_whole


def write_plot(path: str, results: Results) -> None:
    """Draws the out-of-place figures into an image file, of the kind that `path` ends in."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    operations = list(dict.fromkeys(section.operation for section in results.sections))
    figure = Figure(figsize=(5.5 * max(1, len(operations)), 4), layout="constrained")
    for i, operation in enumerate(operations):
        axes = figure.add_subplot(1, len(operations), i + 1)
        sections = [s for s in results.sections if s.operation == operation and s.rows]
        for section in sections:
            rows = sorted(section.rows, key=lambda row: row.size_bytes)
            sizes = [row.size_bytes for row in rows]
            busbw = [row.out_of_place.busbw / 1e9 for row in rows]
            axes.plot(sizes, busbw, marker="o", label=section.transport)
        for device in dict.fromkeys(section.device for section in sections):
            limits: dict[int, float] = {}
            for row in (row for s in sections if s.device == device for row in s.rows):
                limits[row.size_bytes] = max(row.limit / 1e9, limits.get(row.size_bytes, 0.0))
            sizes = sorted(limits)
            copies = [limits[size] for size in sizes]
            axes.plot(sizes, copies, color="gray", linestyle="--", label=f"plain copy, {device}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel("busbw (GB/s)")
        axes.set_title(f"{operation}, {results.ranks} ranks")
        axes.legend()
    with written_whole(path):
        figure.savefig(path, dpi=120)
