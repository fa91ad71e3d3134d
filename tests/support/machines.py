"""Machines for simulations, with figures whose sums are exact."""

from __future__ import annotations

from typing import Any

from shardcomm import Machine

SECONDS = 2.0**-1  # of a hop
BYTES_PER_S = 2048


def machine(**changed: Any) -> Machine:
    """Hosts of 8 ranks with devices of their own, in rings of 2048 bytes/s and half a second a hop."""
    figures: dict[str, Any] = {
        "ranks_per_host": 8,
        "cores": 0,
        "flops_per_s": 1e6,
        "unit_s": 0.0,
        "backward": 2.0,
        "crowding": 1.0,
        "memory_bytes": 10**9,
        "copy_bytes_per_s": 32768.0,
        "code_bytes_per_s": 4032.0,
        "host_latency_s": SECONDS,
        "host_bytes_per_s": BYTES_PER_S,
        "network_latency_s": 4 * SECONDS,
        "network_bytes_per_s": BYTES_PER_S,
        "network_burst_bytes": 0,
        "socket_bytes_per_s": 512.0,
        "turn_s": 0.0,
        "contention": 0.0,
    }
    given = {"name": "made", "origin": "published", "transport": "nccl"}
    given |= {key: changed.pop(key) for key in given.keys() & changed.keys()}
    sources = dict.fromkeys(figures, "made up")
    return Machine(**given, **(figures | changed), sources=sources)
