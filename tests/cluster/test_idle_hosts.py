"""What is said of a host that is ended while its torchrun waits; no hosts are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardcomm.cluster import idle_hosts
from shardcomm.cluster.links import LinkBytes
from shardcomm.cluster.on_host import OnHost


@pytest.mark.parametrize(
    ("pids", "what"), [([], "where no rank was seen"), ([7], "whose ranks had ended")]
)
def test_no_more_is_said_than_was_seen(
    pids: list[int], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may begin and end between two looks, so that a host without any may have had one."""
    host: Any = SimpleNamespace(
        number=0,
        name="host0",
        link_bytes=lambda: LinkBytes(0, 0),
        namespaces=SimpleNamespace(end=lambda: None),
    )
    monkeypatch.setattr(idle_hosts, "rank_of", lambda pid: 0)
    told: list[str] = []
    idle = idle_hosts.IdleHosts([OnHost("host0", "")], told.append)
    for now, there in ((0.0, pids), (60.0, [])):
        monkeypatch.setattr(idle_hosts, "pids_on", lambda host, there=there: there)
        idle.look_at([host], now)
    assert told == [
        f"shardcomm cluster: ended host0, {what}, and whose torchrun waited for another host's\n"
    ]
