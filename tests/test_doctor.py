import json
import subprocess
import sys

import torch

from shardcomm import _C


def doctor(*options: str) -> str:
    command = [sys.executable, "-m", "shardcomm", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_json_says_what_is_there_and_why_not() -> None:
    found = json.loads(doctor("--json", "-"))
    assert found["versions"]["torch"] == torch.__version__
    assert found["cuda"]["built"] is _C.cuda_built
    assert len(found["cuda"]["devices"]) == torch.cuda.device_count()
    for part in ("cuda", "nccl"):
        assert found[part]["available"] is not bool(found[part]["reason"])
    assert found["transports"]["shm"]["usable"]
    for state in found["transports"].values():
        assert state["usable"] is not bool(state["reason"])


def test_screen_names_every_transport() -> None:
    screen = doctor()
    for name in ("shm", "local", "nccl", "c10d"):
        assert f"transport {name} " in screen


def test_file_that_cannot_be_written_is_one_sentence() -> None:
    command = [sys.executable, "-m", "shardcomm", "doctor", "--json", "/nowhere/x.json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 1
    assert run.stderr == "shardcomm doctor: --json /nowhere/x.json: No such file or directory\n"
