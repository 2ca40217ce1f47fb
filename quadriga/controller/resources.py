"""Does the cluster have what the pools need, node by node? Answered before any worker starts, in seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray

from quadriga.errors import ResourceError

RESOURCE_OF_DEVICE = {"cuda": "GPU", "npu": "NPU", "cpu": None}
"""What Ray calls one device; a CPU slot needs CPUs only."""

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Node:
    """A node of the cluster: what it has in all, and what is free now."""

    node_id: str
    ip: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Demand:
    """What one pool wants on one node. Demands of one pool go to different nodes."""

    pool: str
    slots: int
    need: Mapping[str, float]

    def text(self) -> str:
        return f"{self.slots} slot{'s' * (self.slots != 1)} = " + _amounts(self.need)


def slot_need(device: str, slots: int, cpus_per_slot: float) -> dict[str, float]:
    need = {"CPU": cpus_per_slot * slots}
    resource = RESOURCE_OF_DEVICE[device]
    if resource:
        need[resource] = float(slots)
    return need


def cluster_nodes() -> list[Node]:
    """The living nodes, in an order that does not change between runs."""
    if not ray.is_initialized():
        raise ResourceError("Ray not initialized", "call ray.init() first, or start through run_ppo, which does it")
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        Node(n["NodeID"], n["NodeManagerAddress"], n["Resources"], free.get(n["NodeID"], {}))
        for n in ray.nodes()
        if n["Alive"]
    ]
    return sorted(nodes, key=lambda n: (tuple(int(p) if p.isdigit() else 0 for p in n.ip.split(".")), n.node_id))


def detect_device() -> str:
    """The device of a running cluster: cuda if any node has GPUs, else npu, else cpu."""
    totals = [n.total for n in cluster_nodes()]
    for device in ("cuda", "npu"):
        if any(t.get(RESOURCE_OF_DEVICE[device] or "", 0) >= 1 for t in totals):
            return device
    return "cpu"


def place(demands: Sequence[Demand], nodes: Sequence[Node], use_total: bool = False) -> list[Node] | None:
    """A node for each demand such that all fit, or None. Largest demands first, depth-first with a bound on tries."""
    left = [dict(n.total if use_total else n.free) for n in nodes]
    order = sorted(range(len(demands)), key=lambda i: -demands[i].slots)
    chosen: dict[int, int] = {}
    tries = 100_000

    def fits(need: Mapping[str, float], have: Mapping[str, float]) -> bool:
        return all(have.get(resource, 0.0) + TOLERANCE >= amount for resource, amount in need.items())

    def search(position: int) -> bool:
        nonlocal tries
        if position == len(order):
            return True
        demand = demands[order[position]]
        taken = {chosen[i] for i in chosen if demands[i].pool == demand.pool}
        for index, have in enumerate(left):
            tries -= 1
            if tries < 0:
                return False
            if index in taken or not fits(demand.need, have):
                continue
            for resource, amount in demand.need.items():
                have[resource] -= amount
            chosen[order[position]] = index
            if search(position + 1):
                return True
            del chosen[order[position]]
            for resource, amount in demand.need.items():
                have[resource] += amount
        return False

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, len(order) * 2 + 1000))
    try:
        return [nodes[chosen[i]] for i in range(len(demands))] if search(0) else None
    finally:
        sys.setrecursionlimit(limit)


def reserve_nodes(
    demands: Sequence[Demand],
    wait_s: float = 0.0,
    say: Callable[[str], None] = print,
    say_every_s: float = 5.0,
    settle_s: float = 10.0,
) -> list[Node]:
    """A node for each demand, waiting up to `wait_s` for a cluster that is still growing.

    Resources held by workers that are just being stopped come back within a moment: `settle_s` is always granted when
    the cluster is large enough but busy.

    Raises:
        ResourceError: what is needed and what is there, node by node, and the keys to change.
    """
    start = time.monotonic()
    last_said = start
    while True:
        nodes = cluster_nodes()
        placed = place(demands, nodes)
        if placed is not None:
            return placed
        patience = wait_s if place(demands, nodes, use_total=True) is None else max(wait_s, settle_s)
        waited = time.monotonic() - start
        if waited >= patience:
            raise shortage(demands, nodes, wait_s)
        if time.monotonic() - last_said >= say_every_s:
            last_said = time.monotonic()
            say(f"waiting for resources ({waited:.0f} of {patience:.0f} s): {missing(demands, nodes)}")
        time.sleep(min(0.25, max(0.01, patience - waited)))


def missing(demands: Sequence[Demand], nodes: Sequence[Node]) -> str:
    """In one sentence, what is short."""
    for resource in sorted({r for d in demands for r in d.need}, reverse=True):
        want = sum(d.need.get(resource, 0) for d in demands)
        have = sum(n.total.get(resource, 0) for n in nodes)
        if have + TOLERANCE < want:
            return f"Total available {resource}s {have:g} is less than total desired {resource}s {want:g}"
    pool_nodes: dict[str, int] = {}
    for demand in demands:
        pool_nodes[demand.pool] = pool_nodes.get(demand.pool, 0) + 1
    most = max(pool_nodes.values())
    if most > len(nodes):
        return f"{most} nodes are wanted and the cluster has {len(nodes)}"
    if place(demands, nodes, use_total=True) is None:
        return "there is enough in total, but not on each node"
    return "there is enough in total, but other work holds part of it"


def shortage(demands: Sequence[Demand], nodes: Sequence[Node], waited_s: float = 0.0) -> ResourceError:
    lines = [f"Insufficient resources: {missing(demands, nodes)}.", "  needed:"]
    by_pool: dict[str, list[Demand]] = {}
    for demand in demands:
        by_pool.setdefault(demand.pool, []).append(demand)
    for pool, wanted in by_pool.items():
        for slots in dict.fromkeys(d.slots for d in wanted):
            same = [d for d in wanted if d.slots == slots]
            lines.append(f"    {pool}: {len(same)} node{'s' * (len(same) != 1)} with {same[0].text()} each")
    resources = sorted({r for d in demands for r in d.need}, reverse=True)
    lines.append("  in the cluster:")
    for node in nodes:
        parts = [f"{node.total.get(r, 0):g} {r} ({node.free.get(r, 0):g} free)" for r in resources]
        lines.append(f"    node {node.ip}: " + ", ".join(parts))
    return ResourceError("\n".join(lines), _advice(demands, nodes, waited_s))


def _advice(demands: Sequence[Demand], nodes: Sequence[Node], waited_s: float) -> str:
    advice = []
    if place(demands, nodes, use_total=True) is not None:
        advice.append("stop the other work (`ray status` shows it)")
    largest = _largest_that_fits(demands, nodes)
    advice.append(
        f"set trainer.n_gpus_per_node={largest}"
        if largest
        else f"set trainer.nnodes to at most {len(nodes)} and trainer.n_gpus_per_node to what each node has"
    )
    short_of_cpu = all(r == "CPU" for d in demands for r in d.need)
    advice.append("give Ray more slots with ray_kwargs.ray_init.num_cpus" if short_of_cpu else "add nodes")
    advice.append(f"raise trainer.resource_wait_s (now {waited_s:g}) if the cluster is still growing")
    return ", or ".join(advice)


def _largest_that_fits(demands: Sequence[Demand], nodes: Sequence[Node]) -> int | None:
    """The largest equal number of slots per node for which the same pools would fit."""
    too_small = place(demands, nodes, use_total=True) is None
    for slots in range(max(d.slots for d in demands) - 1, 0, -1):
        scaled = [
            Demand(d.pool, slots, {r: a / d.slots * slots for r, a in d.need.items()}) if d.slots > slots else d
            for d in demands
        ]
        if place(scaled, nodes, use_total=too_small) is not None:
            return slots
    return None


def _amounts(need: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {resource}" for resource, amount in sorted(need.items(), reverse=True))
