"""Libraries that are compiled when they are first used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shardcomm.files.compiled import compiled


def test_what_killed_processes_left_in_the_cache_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"  # where the wheel is tested, there is no other
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; : >"$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache, source = tmp_path / "shardcomm", tmp_path / "source" / "empty.cpp"
    old, new = cache / "unfinished-old", cache / "unfinished-new"
    for folder in (old, new, source.parent):
        folder.mkdir(parents=True)
    (old / "half.so").touch()
    a_day_ago = time.time() - 24 * 3600
    os.utime(old, (a_day_ago, a_day_ago))
    source.touch()
    made = compiled("a test", "empty-1", source, ["-std=c++17"])
    assert sorted(cache.iterdir()) == sorted(
        [made, cache / "lock", new]
    )  # another host may compile
