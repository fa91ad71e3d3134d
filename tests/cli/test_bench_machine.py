"""`shardcomm bench --fit`: what is made of the times that ranks have measured. (Measuring takes half a minute.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardcomm import MemoryPlan, Simulation, times_by_flops
from shardcomm.cli.bench import machine as fitting
from shardcomm.cli.bench.machine import _Case, _Measured, _StepTime
from shardcomm.cli.parser import make_parser
from support.machines import machine


def test_a_block_takes_half_of_what_two_more_take_less_its_packing() -> None:
    few, more = _Case(64, 1, 2), _Case(64, 3, 2)
    # In the second round all is slower; what two blocks take more is of one round.
    rounds = [0.0, 10.0, 0.0]
    measured = {
        few: [_StepTime(1.0 + slower, 3.0 + slower) for slower in rounds],
        more: [_StepTime(5.0 + slower, 13.0 + slower) for slower in rounds],
    }
    parameters = 12 * 64 * 64 + 13 * 64
    flops, block = fitting._block(_Measured(measured, 8.0 * parameters, 1.0, [], 1.0), 64, 2)
    assert flops == 2 * 128 * (2 * 12 * 64 * 64 + 2 * 128 * 64)
    assert block == _StepTime(2.0, 5.0 - 1.0)


def test_the_latency_is_what_sharded_steps_take_longer_for_each_meeting() -> None:
    fast = {"flops_per_s": 1e11, "copy_bytes_per_s": 1e10, "host_bytes_per_s": 1e10}
    without = machine(transport="shm", cores=2, host_latency_s=0.0, **fast)
    steps = {}
    for sharded, whole in zip(fitting._SHARDED, fitting._WHOLE, strict=True):
        with torch.device("meta"):
            model = sharded.made()
        times = times_by_flops(model, without, tokens=sharded.tokens, attention=sharded.attention)
        with_latency = replace(without, host_latency_s=1e-4)
        for case, ranks in ((sharded, 2), (whole, 1)):
            step = Simulation.of(MemoryPlan.of(model, ranks), times, with_latency)
            unknown = 0.5  # what neither knows of, and both take
            steps[case] = [_StepTime(0.0, step.step_s + unknown)]
    assert fitting._latency_s(steps, without, 2) == pytest.approx(1e-4, rel=0.05)


def test_a_file_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    args = make_parser().parse_args(["bench", "--fit", "/nowhere/here.json"])
    with pytest.raises(SystemExit) as ended:
        args.run(args)
    assert ended.value.code == 2
    assert "--fit is '/nowhere/here.json'; it must be a file" in capsys.readouterr().err
