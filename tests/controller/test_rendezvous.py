"""How ranks meet: on one address, without a moment in which the port is nobody's, under a name only they know."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from example_workers import Plain

from quadriga.controller import RayClassWithInitArgs, RayWorkerGroup, rendezvous
from quadriga.controller.placement_env import rank_environments
from quadriga.errors import ResourceError

RANK = """
import sys, torch, torch.distributed as dist
from quadriga.controller import rendezvous
rendezvous.join("cpu", int(sys.argv[1]), 2, 20)
seen = torch.tensor([10.0 ** int(sys.argv[1])])
dist.all_reduce(seen)
print(seen.item())
dist.barrier()
"""
STRANGER = RANK.replace("2, 20", "2, 3")
BY_TORCH = """
import os, sys, torch
from quadriga.controller import rendezvous
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.hold_port("127.0.0.1")), "RANK": "0", "WORLD_SIZE": "1"}
rendezvous.serve_if_torch_is_there()
torch.distributed.init_process_group("gloo")
print(torch.distributed.get_world_size())
"""


def listening_addresses(port: int) -> set[str]:
    """Addresses on which somebody listens at this port, from the kernel's tables."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(address)
    return found


LOOPBACK = "0100007F"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
def test_a_group_on_one_machine_listens_on_loopback_alone(pool_of):
    group = RayWorkerGroup(pool_of([2]), RayClassWithInitArgs(Plain))
    assert listening_addresses(group.master_port) == {LOOPBACK}, "held from the start"
    assert group.sum_of_ranks() == [(1, "gloo")] * 2
    assert listening_addresses(group.master_port) == {LOOPBACK}
    group.shutdown()


def start(code: str, rank: int, listener: socket.socket, secret: str) -> subprocess.Popen[str]:
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        rendezvous.SECRET: secret,
    }
    if rank == 0:
        variables[rendezvous.LISTENER] = str(listener.fileno())
    return subprocess.Popen(
        [sys.executable, "-c", code, str(rank)],
        env={**os.environ, **variables},
        pass_fds=[listener.fileno()] if rank == 0 else [],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_stranger_who_connects_does_not_become_a_rank():
    listener = rendezvous.bound_socket("127.0.0.1")
    first = start(RANK, 0, listener, "the right name")
    stranger = start(STRANGER, 1, listener, "a guess")
    assert stranger.wait(60) != 0, "it waits for a rank 0 that never comes under that name"
    second = start(RANK, 1, listener, "the right name")
    listener.close()
    for rank in (first, second):
        out, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors
        assert out.strip() == "11.0"


def test_code_that_joins_by_torchs_own_means_finds_the_store():
    done = subprocess.run([sys.executable, "-c", BY_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_a_network_interface_that_does_not_exist_is_named_before_anybody_waits():
    place = {
        "node_id": "n0",
        "node_ip": "10.0.0.1",
        "interface": "eth0",
        "interfaces": ["lo", "eth0"],
        "chosen_interface": "eth7",
        "cores": 2,
    }
    with pytest.raises(ResourceError, match=r"no network interface 'eth7', only lo, eth0"):
        rank_environments([place], "cpu", "")
