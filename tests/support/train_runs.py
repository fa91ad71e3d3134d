"""Small runs of `shardcomm train`: the function that the command calls on every rank, and what it refuses."""

from __future__ import annotations

import argparse
import dataclasses
import io
from contextlib import redirect_stderr
from typing import Any

import pytest

from shardcomm import launch
from shardcomm.cli.train import command, job
from shardcomm.trace.timeline import Timeline

SMALL = ["--steps", "6", "--width", "32", "--layers", "3", "--batch", "2", "--context", "16"]
DEADLINE_S = 120.0


def run(text: str, **changed: Any) -> job.Result:
    """Of a small run; by the function that the command calls on every rank."""
    ranks = changed.pop("ranks", 2)
    options = command.options_of(parsed(*SMALL, "--text", text))
    options = dataclasses.replace(options, **changed)
    return launch(quiet_train, ranks, (options,), timeout_s=DEADLINE_S)[0][0]


def quiet_train(options: job.TrainOptions) -> tuple[job.Result, Timeline | None]:
    with redirect_stderr(io.StringIO()):  # the progress bar is no output of the tests
        return job.train(options)


def parsed(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["train", *args])


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What the command says, in this process, before it starts any."""
    with pytest.raises(SystemExit, match="2"):  # noqa: PT012
        arguments = parsed(*args)
        arguments.run(arguments)
    return capsys.readouterr().err
