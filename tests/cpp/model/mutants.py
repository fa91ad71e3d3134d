"""Breaks each rule of the protocol once, and checks that the model notices. docs/protocol.md.

The rules are in mutants.txt. Words on the command line choose those that contain one of them.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from check import REPOSITORY, build, configure


@dataclass(frozen=True)
class Mutant:
    """Where `before` becomes `after` in `file`, `program` finds one of `properties` violated."""

    rule: str
    file: str
    program: str
    properties: list[str]
    before: str
    after: str


def read(path: Path) -> list[Mutant]:
    """The rules of a file: a name, what must notice, and lines to be replaced by lines."""
    mutants = []
    for block in path.read_text().split("\n== ")[1:]:
        rule, notice, *lines = block.rstrip("\n").split("\n")
        file, claim = notice.split(": ")
        program, properties = claim.split(" finds ")
        before = "\n".join(line[2:] for line in lines if line.startswith("- "))
        after = "\n".join(line[2:] for line in lines if line.startswith("+ "))
        mutants.append(Mutant(rule, file, program, properties.split(), before, after))
    return mutants


def verdict_on(mutant: Mutant, program: Path) -> str:
    """The model's line about a violation, or nothing."""
    command = [str(program), "--most-states", "2000000", mutant.program]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    return next((line for line in run.stdout.splitlines() if " VIOLATED " in line), "")


def main() -> int:
    """Returns 0 if each is noticed."""
    folder = REPOSITORY / "build" / "mutants"
    copy = folder / "csrc"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(REPOSITORY / "csrc", copy)
    configure(folder / "build", copy)
    wanted = sys.argv[1:] or [""]
    mutants = read(Path(__file__).with_name("mutants.txt"))
    mutants = [mutant for mutant in mutants if any(word in mutant.rule for word in wanted)]
    noticed = 0
    for mutant in mutants:
        file = copy / mutant.file
        right = file.read_text()
        if mutant.before not in right:
            raise ValueError(f"'{mutant.rule}': {mutant.file} has no such text:\n{mutant.before}")
        file.write_text(right.replace(mutant.before, mutant.after))
        try:
            verdict = verdict_on(mutant, build(folder / "build"))
        finally:
            file.write_text(right)
        is_noticed = verdict.split(" ")[0] in mutant.properties
        noticed += is_noticed
        print(f"{'noticed' if is_noticed else 'MISSED '}  {mutant.rule}: {verdict or 'nothing'}")
        sys.stdout.flush()
    print(f"{noticed} of {len(mutants)} broken rules noticed")
    return 0 if noticed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
