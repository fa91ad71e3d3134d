"""The fixture of tests that run once with each instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardcomm import _C


@pytest.fixture(params=_C.instruction_sets(), ids=lambda each: each.name)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _C.instruction_set()
    _C.use_instruction_set(request.param)
    yield
    _C.use_instruction_set(before)
