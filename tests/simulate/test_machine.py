"""Machine files: they are what was saved, and what is wrong with one is said in a sentence."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcomm import Machine
from shardcomm.simulate.machine import shipped
from support.machines import machine


def written(path: Path, change: dict[str, Any]) -> Path:
    """A machine's file in which some things are otherwise; None leaves them out."""
    machine().save(path)
    document = json.loads(path.read_text()) | change
    path.write_text(
        json.dumps({key: value for key, value in document.items() if value is not None})
    )
    return path


def test_a_file_is_read_as_it_was_saved(tmp_path: Path) -> None:
    machine().save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine()


@pytest.mark.parametrize("name", shipped())
def test_each_shipped_machine_says_that_its_figures_are_published_and_where(name: str) -> None:
    there = Machine.load(name)
    assert there.name == name
    assert there.origin == "published"
    cited = re.compile(
        r"https://|#\d+|data sheet|arXiv|src/graph|not published|none (are )?shared?|of transport"
    )
    assert all(cited.search(source) for source in there.sources.values())


def test_there_are_machines_of_h100s_and_h200s() -> None:
    assert shipped() == ("8xH100", "8xH200")
    # 8 cards of 400 Gbit/s carry no more than that.
    assert all(Machine.load(name).network_bytes_per_s < 8 * 400e9 / 8 for name in shipped())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_s": 0}, "flops_per_s is 0; it must be a number from 1e+06 to 1e+17"),
        ({"flops_per_s": 1e30}, "flops_per_s is 1e+30; it must be a number"),
        ({"host_bytes_per_s": -1}, "host_bytes_per_s is -1; it must be a number from 1000"),
        ({"host_bytes_per_s": float("nan")}, "host_bytes_per_s is nan; it must be a number"),
        ({"host_latency_s": "5us"}, "host_latency_s is '5us'; it must be a number from 0 to 1"),
        ({"ranks_per_host": 2.5}, "ranks_per_host is 2.5; it must be a whole number from 1"),
        ({"ranks_per_host": True}, "ranks_per_host is True; it must be a whole number"),
        ({"contention": 1.5}, "contention is 1.5; it must be a number from 0 to 0.99"),
        ({"turn_s": 1.5}, "turn_s is 1.5; it must be a number from 0 to 1"),
        ({"transport": "tcp"}, "transport is 'tcp'; accepted: 'shm', 'hosts', 'nccl'"),
        ({"cores": -1}, "cores is -1; it must be a number from 0 to 4096"),
        ({"transport": "hosts"}, "cores is 0; with transport 'hosts' it must be more than 0"),
        (
            {"transport": "hosts", "cores": 1, "network_bytes_per_s": 0},
            "network_bytes_per_s is 0; with transport 'hosts' it must be more than 0",
        ),
        (
            {"transport": "hosts", "cores": 1, "socket_bytes_per_s": 0},
            "socket_bytes_per_s is 0; with transport 'hosts' it must be more than 0",
        ),
        ({"origin": "guessed"}, "origin is 'guessed'; accepted: 'measured', 'published'"),
        ({"sources": {}}, "sources has no 'ranks_per_host'; each number says where it comes from"),
        ({"unit_s": None}, "it must be an object with 'unit_s'"),
        ({"sources": None}, "it must be an object with 'sources'"),
        ({"sources": {"cores": 3}}, "['sources']['cores'] is 3; it must be a printable text"),
        ({"shardcomm_machine": 2}, "['shardcomm_machine'] is 2; it must be a whole number from 1"),
        ({"name": 7}, "['name'] is 7; it must be a printable text"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Machine.load(written(tmp_path / "machine.json", change))


def test_what_is_no_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("H100")
    with pytest.raises(
        ValueError, match="is not a machine's file, as `shardcomm bench --fit FILE`"
    ):
        Machine.load(tmp_path / "list.json")
    with pytest.raises(ValueError, match="it is not JSON"):
        Machine.load(tmp_path / "text.json")
    with pytest.raises(OSError, match="no such file, and none of the machines 8xH100, 8xH200"):
        Machine.load(tmp_path / "none.json")


def test_sources_and_names_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="Machine: sources is a NoneType; it must be a dict"):
        replace(machine(), sources=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Machine.load: name is a NoneType; it must be a path, or"):
        Machine.load(None)  # type: ignore[arg-type]
