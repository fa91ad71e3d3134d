"""The peers of bench/overhead.py --device cuda, on CPUs: torch's process group is Gloo there."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from shardcomm import launch

BENCH = Path(__file__).resolve().parents[2] / "bench"


def measured() -> tuple[dict[str, int], dict[str, str]]:
    """How many samples there are of each, and which peer each has."""
    sys.path.insert(0, str(BENCH))
    import peers_overhead

    peers_overhead.UNITS, peers_overhead.STEPS = 3, 7
    dist.init_process_group("gloo")
    samples = peers_overhead.measure_beside_torch(2, lambda: None)
    return {name: len(values) for name, values in samples.items()}, peers_overhead.peers_of(samples)


def test_what_is_measured_has_a_peer() -> None:
    for counts, peers in launch(measured, 2, timeout_s=60):
        assert set(peers) == {"gather, bf16", "reduce, bf16", "reduce, f32", "step, a unit"}
        for name, peer in peers.items():
            assert counts[name] == counts[peer] == (7 - 5 if name.startswith("step") else 2)
