"""The findings and the self-test's results for people, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

_ERRORS_SHOWN = 3


def screen(found: dict[str, Any]) -> str:
    """The whole report as text."""
    tests, limits = found["self_test"], found["shared_memory"]
    tested = {test["name"] for test in tests}
    transports = [
        (name, _transport(state, name in tested)) for name, state in found["transports"].items()
    ]
    memory = [(name, _size(each["value"]), each["meaning"]) for name, each in limits.items()]
    return "\n\n".join(
        [
            _table(_versions(found)),
            _section("Transports", transports),
            _section("Memory that ranks of shm share (unnamed; /dev/shm is not used)", memory),
            _tests(tests),
            _paths(tests),
        ]
    )


def _versions(found: dict[str, Any]) -> Iterable[tuple[str, str]]:
    versions, machine = found["versions"], found["machine"]
    cuda, library, triton = found["cuda"], found["nccl"], found["triton"]
    named = (f"{name} {versions[name]}" for name in ("shardcomm", "python", "torch"))
    yield "versions", ", ".join(named)
    yield "machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"
    yield "CUDA kernels", f"built with {cuda['runtime_version']}" if cuda["built"] else "not built"
    yield "GPUs", ", ".join(cuda["devices"]) or "none"
    yield (
        "NCCL",
        f"{library['version']}, {library['path']}" if library["usable"] else _not_usable(library),
    )
    for entry in library["missing"]:
        yield "", f"too old for {entry}"
    yield "Triton", triton["version"] or _not_usable(triton)
    built = found["backend"]
    yield (
        "backend",
        "compiled against this torch" if built["usable"] else _not_usable(built),
    )


def _transport(state: dict[str, Any], tested: bool) -> str:
    if not state["usable"]:
        return _not_usable(state)
    return "can be used" if tested else "can be used; not tested: each rank needs a GPU of its own"


def _not_usable(state: dict[str, Any]) -> str:
    return f"no: {state['reason']}\n{state['remedy']}"


def _tests(tests: list[dict[str, Any]]) -> str:
    failed = sum(bool(test["errors"]) for test in tests)
    verdict = f"{failed} of {len(tests)} FAILED" if failed else "passed"
    seconds = sum(test["seconds"] for test in tests)
    rows = []
    for test in tests:
        shown = test["errors"][:_ERRORS_SHOWN]
        if more := len(test["errors"]) - len(shown):
            shown = [*shown, f"and {more} more, with --json"]
        rows.append((test["name"], "\n".join(shown) or "right"))
    return _section(f"Self-test: {verdict} ({seconds:.1f} s)", rows)


def _paths(tests: list[dict[str, Any]]) -> str:
    """A table with a row for each transport and kind of memory, and below it why a path is not the fastest."""
    operations = list(dict.fromkeys(path["operation"] for test in tests for path in test["paths"]))
    notes: dict[str, int] = {}
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for test in tests:
        for path in test["paths"]:
            note = notes.setdefault(path["reason"], len(notes) + 1) if path["reason"] else None
            row = rows.setdefault((test["name"], path["memory"]), {})
            row[path["operation"]] = f"{path['taken']} ({note})" if note else path["taken"]
    table = [("", "", *operations)]
    table += [(*of, *(row.get(name, "") for name in operations)) for of, row in rows.items()]
    title = "Path of each collective, by its buffer's memory: Communicator.allocate's, or ordinary"
    reasons = [f"  ({number}) {reason}" for reason, number in notes.items()]
    return "\n".join([_section(title, table), *reasons])


def _section(title: str, rows: Iterable[tuple[str, ...]]) -> str:
    return title + "\n" + textwrap.indent(_table(rows), "  ")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    """Columns side by side. Cells of the last column may have several lines."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    indent = " " * (sum(widths) + 2 * len(widths))
    lines = []
    for *cells, last in rows:
        head = "".join(f"{cell:<{width}}  " for cell, width in zip(cells, widths, strict=True))
        lines.append((head + last.replace("\n", "\n" + indent)).rstrip())
    return "\n".join(lines)


def _size(value: int | str | None) -> str:
    if value is None:
        return "no limit"
    if isinstance(value, str):
        return value
    unit, name = (1 << 30, "GiB") if value >= 1 << 30 else (1 << 20, "MiB")
    return f"{value / unit:.1f} {name}"
