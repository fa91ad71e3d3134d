"""Writes the tables of README.md and docs/, and the picture of bandwidths, so that nobody types a figure.

    python bench/NAME.py --json bench/results/FILE.json    # any comparison script, run on a quiet machine
    python bench/report.py                                 # or --check, which only says what differs

Between `<!-- bench: NAME -->` and `<!-- end -->` a page gets the table that bench/NAME.py printed on its last saved
run, and where that was. The last one is found by the date inside, the name by the command. NAME has its option where a
script compares more than one thing (`compare_fsdp2 --drop-in`, `overhead --device=fake`), or its part (`gpu_engine
alone`), and at its end the GPU if it measured one (`gpu_kernels, H200`). Without a saved result there is nothing in
between.
`goals` is of all last results: how many of the bounds that `--check` holds each to were kept, and `missed goals` which
were not.

The picture, docs/compare_gloo.png, is drawn with matplotlib; --check does not look at it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PICTURE = ROOT / "docs/compare_gloo.png"

BEGIN = "<!-- bench: "
BLOCK = re.compile(
    rf"^({BEGIN}([^\n]+) -->\n)((?:(?!<!--).)*)(<!-- end -->\n)", re.DOTALL | re.MULTILINE
)
TOLD = ("--drop-in", "--device=fake", "--device=cuda", "alone", "offloaded", "threads")
PEERS = {"C, window": "shm, window", "C": "shm", "gloo": "Gloo", "Open MPI": "Open MPI"}
PANELS = ("all_gather", "reduce_scatter")
# What the goals of a comparison are of, if not ratios to a peer.
GOALS_OF = {
    "bound_calls": "microseconds beyond the collective",
    "checks": "microseconds a parameter",
    "compare_gloo": "ratio; a call of Python's, microseconds",
    "memory": "planned bytes by which it is off, as a share; a strategy trains under the limit (1) or not (0)",
    "microbenchmark": "distance between the ranges of the tool's times and a loop's",
    "models": "differences in parameters; the tokens are the same (1)",
    "overhead --device=fake": "microseconds",
    "padding": "shares of padding",
    "simulate": "errors of predictions",
    "torch_tests": "tests that fail",
}

Result = dict[str, Any]


def name_of(result: Result) -> str:
    """What compared what: "compare_fsdp2 --drop-in" of "python bench/compare_fsdp2.py --drop-in --json x"."""
    words = result["command"].replace("--device ", "--device=").split()
    script = next(word for word in words if word.endswith(".py"))
    told = [word for word in words if word in TOLD]
    name = " ".join([Path(script).stem, *told])
    if not name.startswith("gpu_") and "--device=cuda" not in told:
        return name
    gpu = result["machine"]["gpu"].removeprefix("NVIDIA ")  # such as "H100 80GB HBM3"
    return f"{name}, {re.sub(r' [0-9]+GB.*', '', gpu)}"


def newest() -> dict[str, Result]:
    """The last result with a table, by name."""
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    in_order = sorted((r for r in results if "table" in r), key=lambda result: result["date"])
    return {name_of(result): result for result in in_order}


def table(header: list[str], *rows: list[str]) -> str:
    """In Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def comparison(name: str, result: Result) -> str:
    """Title, where it was measured, and the table."""
    machine = result["machine"]
    where = f"{machine.get('gpu') or machine['cpu']}, {machine['cores']} cores"
    day, torch = result["date"][:10], result["versions"]["torch"]
    title = f"**{result['title'].rstrip('.')}** (`{name}`; {where}, torch {torch}, {day})"
    return f"{title}\n\n{table(*result['table'])}"


def wanted(bounds: list[Result]) -> str:
    """The lowest and the highest limit of either kind."""
    parts = []
    for kind in ("at_least", "at_most"):
        limits = [bound[kind] for bound in bounds if bound[kind] is not None]
        if limits:
            ends = dict.fromkeys(f"{limit:g}" for limit in (min(limits), max(limits)))
            parts.append(f"{kind.replace('_', ' ')} {' to '.join(ends)}")
    return "; ".join(parts)


def goals(results: dict[str, Result]) -> str:
    """How many of its goals each comparison has reached."""
    rows = [
        [
            name,
            GOALS_OF.get(name, "ratio"),
            wanted(result["bounds"]),
            f"{sum(bound['holds'] for bound in result['bounds'])} of {len(result['bounds'])}",
        ]
        for name, result in sorted(results.items())
    ]
    return table(["comparison", "goals are of", "wanted", "reached"], *rows)


def missed_goals(results: dict[str, Result]) -> str:
    """Each goal that was not reached."""
    rows = [
        [name, bound["name"], f"{bound['value']:.3g}", wanted([bound])]
        for name, result in sorted(results.items())
        for bound in result["bounds"]
        if not bound["holds"]
    ]
    return table(["comparison", "case", "reached", "wanted"], *rows)


def rewritten(page: Path, tables: dict[str, str]) -> tuple[str, list[str]]:
    """The page as it should be, and the names of the blocks that were not so."""
    text = page.read_text()
    if len(BLOCK.findall(text)) != len(re.findall(rf"^{BEGIN}", text, re.MULTILINE)):
        here = page.relative_to(ROOT)
        sys.exit(f"{here}: a `{BEGIN}NAME -->` line has no `<!-- end -->` line of its own")
    changed = []

    def fill(block: re.Match[str]) -> str:
        begin, name, old, end = block.groups()
        new = tables.get(name, "")
        if new != old:
            changed.append(name)
        return begin + new + end

    return BLOCK.sub(fill, text), changed


def draw(result: Result) -> None:
    """Bus bandwidth over size as compare_gloo measured it: a panel for each operation and number of ranks."""
    from matplotlib.figure import Figure

    # (operation, ranks) -> peer -> [(bytes, GB/s)]
    panels: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for name, times in result["figures"].items():
        operation, size, _, ranks, _ = name.split()  # "all_gather 1024 B 2 ranks"
        if operation not in PANELS:
            continue
        lines = panels.setdefault((operation, int(ranks)), {})
        moved = int(size) * (int(ranks) - 1) / int(ranks)
        for peer, seconds in times.items():
            if peer in PEERS:
                lines.setdefault(peer, []).append((int(size), moved / seconds / 1e9))
    figure = Figure(figsize=(3 * len(panels), 3), layout="constrained")
    shared = None
    for i, ((operation, ranks), lines) in enumerate(panels.items()):
        shared = axes = figure.add_subplot(1, len(panels), i + 1, sharey=shared)
        for peer, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=PEERS[peer])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{operation}, {ranks} ranks")
        axes.set_xlabel("size (bytes)")
        axes.label_outer()
    figure.axes[0].set_ylabel("busbw (GB/s)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=72, pil_kwargs={"optimize": True})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 if a table is not its result's",
    )
    args = parser.parse_args()
    results = newest()
    tables = {name: comparison(name, result) for name, result in results.items()}
    tables |= {"goals": goals(results), "missed goals": missed_goals(results)}
    differing = []
    for page in PAGES:
        text, changed = rewritten(page, tables)
        differing += [f"{page.relative_to(ROOT)}: {name}" for name in changed]
        if not args.check:
            page.write_text(text)
    if args.check:
        if differing:
            sys.exit(
                "not as in bench/results:\n  {}\nRun: python bench/report.py".format(
                    "\n  ".join(differing)
                )
            )
        return
    print("rewritten:", *(differing or ["nothing"]), sep="\n  ")
    if "compare_gloo" in results:
        draw(results["compare_gloo"])


if __name__ == "__main__":
    main()
