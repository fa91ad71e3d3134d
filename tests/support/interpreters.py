"""Runs programs, each in a process of its own that ends as an interpreter does. Shardcomm is loaded once for all.

The fork server's processes end without that. What is about a start, or about signals, starts `python` instead.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from select import select
from subprocess import CompletedProcess

from torch.distributed import TCPStore

DEADLINE_S = 60.0

# A child runs the program as its main module, whose names live until the interpreter takes them down. What torch alone
# has made is frozen, since the collection of garbage at each child's end would copy all of its pages.
_FORKS = """
import faulthandler, gc, json, os, sys
import torch
gc.collect()
gc.freeze()
import shardcomm
for line in sys.stdin:
    program, folder, environments = json.loads(line)
    children = []
    for environment in environments:
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            for number, name in ((1, "out"), (2, "err")):
                file = os.path.join(folder, f"{len(children)}.{name}")
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            faulthandler.enable()
            exec(program)
            sys.exit()
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    print(json.dumps([os.waitstatus_to_exitcode(status) for status in statuses]), flush=True)
"""


def run(program: str) -> CompletedProcess[str]:
    """Its exit status, and what it has printed."""
    return run_each(program, [{}])[0]


def run_ranks(program: str, ranks: int) -> list[CompletedProcess[str]]:
    """The same of each rank, with the environment that torchrun gives."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    everywhere = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    return run_each(
        program,
        [everywhere | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)],
    )


def run_each(program: str, environments: list[dict[str, str]]) -> list[CompletedProcess[str]]:
    """The same of a process for each of these additions to the environment, all at once."""
    forks = _forks()
    assert forks.stdin is not None
    assert forks.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        forks.stdin.write(json.dumps([program, folder, environments]) + "\n")
        forks.stdin.flush()
        if not select([forks.stdout], [], [], DEADLINE_S)[0]:
            # Each writes where it is to its errors.
            subprocess.run(["pkill", "--signal", "ABRT", "--parent", str(forks.pid)], check=False)
        return [
            CompletedProcess(
                program,
                status,
                Path(folder, f"{i}.out").read_text(),
                Path(folder, f"{i}.err").read_text(),
            )
            for i, status in enumerate(json.loads(forks.stdout.readline()))
        ]


@functools.cache
def _forks() -> subprocess.Popen[str]:
    """Ends when this process does, and with it the pipe that it reads."""
    command = [sys.executable, "-c", _FORKS]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
