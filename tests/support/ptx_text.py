"""PTX as text: the kernels of a module, and what each declares and does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from support.ptx_operations import TYPES

# Of registers that every thread has, by their names' beginnings.
_SPECIAL = {f"%{name}.": "b32" for name in ("tid", "ntid", "ctaid", "nctaid")}


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    nbytes: int


@dataclass
class KernelText:
    """A kernel. `labels` has places in `instructions`; `registers` has types of registers, by their names' beginnings.

    `local` is the name of a thread's local memory. A register of an inner scope is declared under a name of its own
    here, as two scopes may both have a "%p1".
    """

    parameters: list[Parameter]
    threads: int
    registers: dict[str, str] = field(default_factory=lambda: dict(_SPECIAL))
    labels: dict[str, int] = field(default_factory=dict)
    instructions: list[str] = field(default_factory=list)
    local: str = ""
    local_bytes: int = 0


def texts_of(module: str) -> dict[str, str]:
    """The texts of a module's kernels, by name."""
    texts = re.split(r"^(?:\.visible )?\.entry ", module, flags=re.MULTILINE)[1:]
    return {text.partition("(")[0]: text for text in texts}


def read_kernel(text: str) -> KernelText:
    """Reads what follows ".entry"."""
    head, _, body = text.partition("\n{\n")
    declared = re.findall(
        r"\.param (?:\.align \d+ )?\.(\w+)[^,\n]*? (\w+)(?:\[(\d+)\])?[,\n]", head
    )
    (threads,) = re.findall(r"\.(?:reqntid|maxntid) (\d+)", head)
    kernel = KernelText(
        [
            Parameter(name, type, TYPES[type].itemsize * int(count or 1))
            for type, name, count in declared
        ],
        int(threads),
    )
    scopes: list[dict[str, str]] = [{}]  # names of registers of inner scopes, as they are here
    number_of_scopes = 0
    for statement in _statements(body):
        if statement == "{":
            number_of_scopes += 1
            scopes.append(scopes[-1].copy())
        elif statement == "}":
            scopes.pop()
            if not scopes:
                break
        elif statement.endswith(":"):
            kernel.labels[statement[:-1]] = len(kernel.instructions)
        elif found := re.fullmatch(r"\.reg \.(\w+)\s+(%?\w+)(?:<\d+>)?", statement):
            type, name = found.groups()
            if len(scopes) > 1:
                scopes[-1][name] = f"%{name.strip('%')}_{number_of_scopes}"
            kernel.registers[scopes[-1].get(name, name)] = type
        elif found := re.fullmatch(r"\.local \.align \d+ \.b8 (\w+)\[(\d+)\]", statement):
            kernel.local, kernel.local_bytes = found[1], int(found[2])
        elif not statement.startswith((".loc", ".pragma")):
            renamed = re.sub(r"%?\b\w+", lambda word: scopes[-1].get(word[0], word[0]), statement)
            kernel.instructions.append(renamed)
    return kernel


def _statements(body: str) -> Iterator[str]:
    """Labels, instructions without their semicolon, and the braces of scopes."""
    without_comments = re.sub(r"//[^\n]*", "", body)
    for found in re.finditer(r"[{}]|\$\w+:|\.loc\s[^\n]*|[^\s;][^;]*(?=;)", without_comments):
        yield found[0].strip()
