"""hybrid_shard over two hosts: shared memory inside each, Gloo between them.

The hosts are network namespaces joined by a virtual cable, with process namespaces of their own: what is said over one
cable is all that they have of each other, as `rendezvous.host_identity` sees it, too. torchrun runs on each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardcomm import CommError, fully_shard
from support.nets import batch, loss_of, make, sgd_of

STEPS = 3
DEADLINE_S = 120.0
PORT = 29500  # of a namespace that nobody else is in


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def inside(name: str) -> list[str]:
    """What a command on this host begins with; all that it starts ends with it."""
    return f"ip netns exec {name} unshare --pid --fork --mount-proc --kill-child".split()


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """Of each: its namespace, its address, its network device."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip(
            "no ip (iproute2) or no unshare (util-linux) here, to make hosts of namespaces with"
        )
    names = [f"shardcomm-{os.getpid()}-{i}" for i in range(2)]
    try:
        try:
            for name in names:
                run("ip", "netns", "add", name)
                run(*inside(name), "true")
            ends = [("netns", names[0], "type", "veth", "peer"), ("netns", names[1])]
            run("ip", "link", "add", *(word for end in ends for word in ("name", "cable", *end)))
            for i, name in enumerate(names):
                run("ip", "-n", name, "address", "add", f"10.0.0.{i + 1}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    run("ip", "-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield [(name, f"10.0.0.{i + 1}", "cable") for i, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def program(results: Path) -> None:
    """A rank: trains, and then for ever, until rank 3 dies."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ours, plain = make(layers=3), make(layers=3)
    engine = fully_shard(ours, init_device_mesh("cpu", (2, 2)), strategy="hybrid_shard")
    assert (engine.mesh.shard.transport, engine.mesh.replicate.transport) == ("shm", "c10d")
    assert engine.mesh.rank == rank
    ddp = torch.nn.parallel.DistributedDataParallel(plain)
    for model in (ours, ddp):
        optimizer = sgd_of(model)
        for step in range(STEPS):
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save((engine.full_state_dict(), plain.state_dict()), results / f"{rank}.pt")
    try:
        while True:
            loss_of(ours, batch(rank, 0)).backward()
            if rank == 3:
                os._exit(0)
    except CommError as error:
        (results / f"{rank}.txt").write_text(str(error))
        os._exit(0)


@pytest.mark.covers(
    "training parity", "failed ranks", strategies=["hybrid_shard"], transports=["shm", "c10d"]
)
def test_training_over_two_hosts_is_ddp_and_a_dead_rank_ends_all(
    hosts: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    agents = [
        subprocess.Popen(
            [
                *inside(name),
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--node-rank", str(i), "--nproc-per-node", "2"),
                *("--master-addr", hosts[0][1], "--master-port", str(PORT)),
                *(__file__, str(tmp_path)),
            ],
            env=os.environ | {"GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, (name, _, device) in enumerate(hosts)
    ]
    try:
        outputs = [agent.communicate(timeout=DEADLINE_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()  # which ends all that runs in its namespace
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    for rank in range(4):
        ours, ddp = torch.load(tmp_path / f"{rank}.pt")
        for name, value in ddp.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
    for rank in range(3):
        assert (tmp_path / f"{rank}.txt").read_text()


if __name__ == "__main__":
    program(Path(sys.argv[1]))
