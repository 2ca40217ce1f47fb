"""Nodes that go away between being chosen and being used. Ray itself notices a dead machine only after a while."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

import ray

from quadriga.controller.resources import Node
from quadriga.errors import ResourceError

CONNECT_TIMEOUT_S = 1.5


def lost_nodes(nodes: Iterable[Node]) -> list[Node]:
    """Those of `nodes` that have left the cluster, or whose raylet does not take a connection any more."""
    now = {n["NodeID"]: n for n in ray.nodes() if n["Alive"]}
    return [n for n in nodes if n.node_id not in now or not _answers(n.ip, now[n.node_id]["NodeManagerPort"])]


def node_lost_error(lost: Sequence[Node], pool: str) -> ResourceError:
    return ResourceError(
        f"node {', '.join(sorted({n.ip for n in lost}))} went away after its slots were chosen for {pool}",
        "start Ray on it again and see its logs, or ask for what the other nodes have (trainer.nnodes, trainer.n_gpus_per_node)",
    )


def _answers(ip: str, port: int) -> bool:
    try:
        socket.create_connection((ip, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True
