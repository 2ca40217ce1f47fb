"""Resource pools on Ray: one placement group per node, on nodes chosen beforehand, never waited for without a deadline."""

from __future__ import annotations

import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from quadriga.controller.pool import ResourcePool
from quadriga.controller.resources import (
    Demand,
    Node,
    cluster_nodes,
    detect_device,
    reserve_nodes,
    shortage,
    slot_need,
)
from quadriga.controller.slot_process import EarlyProcesses
from quadriga.errors import ConfigError, ResourceError

PLACEMENT_TIMEOUT_S = 7.0
"""Fitting groups are placed at once; longer means that a node went away or other work was faster."""


@dataclass(frozen=True)
class Bundle:
    """One slot of a pool: bundle `index` of the placement group of its node."""

    group: PlacementGroup
    group_number: int
    index: int


class RayResourcePool(ResourcePool):
    """A pool whose slots are bundles of Ray placement groups, one group per node.

    Args:
        process_on_nodes: slots on each node.
        use_gpu: False is short for `device="cpu"`.
        name_prefix: of the placement groups; random by default.
        max_colocate_count: how many worker groups may share a slot, each with processes of its own.
        detached: the placement groups outlive the driver.
        accelerator_type: a node resource that every slot asks a sliver of, such as `accelerator_type:H200`.
        device: cuda, npu or cpu; by default what the cluster has (cpu with `use_gpu=False`).
        cpus_per_slot: CPUs reserved for a slot, whatever number of groups share it.
        wait_s: how long to wait for a cluster that is still growing.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        device: str | None = None,
        cpus_per_slot: float = 1.0,
        wait_s: float = 0.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"pool_{secrets.token_hex(3)}_"
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.cpus_per_slot = cpus_per_slot
        self.wait_s = wait_s
        self._device = device if use_gpu else "cpu"
        self._groups: list[PlacementGroup] | None = None
        self._nodes: list[Node] = []
        self.node_slots: dict[str, int] = {}
        """Slots on each node, those of the other pools of the same manager included."""
        self._early: EarlyProcesses | None = None

    @property
    def device(self) -> str:
        if self._device is None:
            self._device = detect_device()
        return self._device

    def demands(self, pool_name: str | None = None) -> list[Demand]:
        """What the pool needs, node by node."""
        needs = []
        for slots in self.store:
            need = slot_need(self.device, slots, self.cpus_per_slot)
            if self.accelerator_type:
                need[self.accelerator_type] = 1e-4 * slots
            needs.append(Demand(pool_name or self.name_prefix.rstrip("_"), slots, need))
        return needs

    def get_placement_groups(self, nodes: Sequence[Node] | None = None) -> list[PlacementGroup]:
        """One placement group per entry of `store`, made on the first call.

        Args:
            nodes: where each entry goes; by default chosen now, so that entries lie on different nodes.
        """
        if self._groups is None:
            self._groups = _make_groups(self, nodes or reserve_nodes(self.demands(), self.wait_s))
            self._nodes = [_node_of(group) for group in self._groups]
            self.node_slots = {n.node_id: slots for n, slots in zip(self._nodes, self.store)}
        return self._groups

    def refuse_lost_nodes(self) -> None:
        """ResourceError if a node that holds slots of this pool has gone away."""
        if lost := lost_nodes(self._nodes):
            raise node_lost_error(lost, self.name_prefix.rstrip("_"))

    def bundles(self) -> list[Bundle]:
        """The slots in rank order."""
        groups = self.get_placement_groups()
        return [Bundle(g, n, i) for n, (g, slots) in enumerate(zip(groups, self.store)) for i in range(slots)]

    def start_early(self, preparation: str) -> None:
        """Start the processes of all slots now; see `EarlyProcesses`."""
        self._early = EarlyProcesses(self, preparation)

    def take_early(self, bundle: Bundle) -> tuple[str, Any] | None:
        """Name and handle of the process that was started early in a slot, if there is one that nobody has taken."""
        return self._early.take(bundle) if self._early is not None else None

    def shutdown(self) -> None:
        """Give the slots back; workers still in them are killed."""
        for group in self._groups or ():
            remove_placement_group(group)
        self._groups = None


class SubRayResourcePool(RayResourcePool):
    """Some of the slots of other pools, seen as a pool."""

    def __init__(
        self, parents: Sequence[RayResourcePool], chosen: Callable[[], list[Bundle]], sizes: list[int]
    ) -> None:
        first = parents[0]
        super().__init__(
            sizes, max_colocate_count=first.max_colocate_count, device=first.device, cpus_per_slot=first.cpus_per_slot
        )
        self._parents, self._chosen = tuple(parents), chosen

    def bundles(self) -> list[Bundle]:
        return self._chosen()

    def get_placement_groups(self, nodes: Sequence[Node] | None = None) -> list[PlacementGroup]:
        return list(dict.fromkeys(b.group for b in self.bundles()))

    def refuse_lost_nodes(self) -> None:
        for parent in self._parents:
            parent.refuse_lost_nodes()

    def shutdown(self) -> None:
        """Nothing: the slots belong to the pools this one was cut from."""


def split_resource_pool(pool: RayResourcePool, sizes: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Cut a pool's slots, in rank order, into pools of the given sizes (or into `sizes` equal ones)."""
    if isinstance(sizes, int):
        if sizes < 1 or pool.world_size % sizes:
            raise ConfigError(
                f"{pool.world_size} slots cannot be split into {sizes} equal pools", "give the sizes as a list"
            )
        sizes = [pool.world_size // sizes] * sizes
    if sum(sizes) != pool.world_size or min(sizes, default=0) < 1:
        raise ConfigError(
            f"sizes {list(sizes)} do not cover the pool's {pool.world_size} slots",
            "give positive sizes that add up to it",
        )
    parts, start = [], 0
    node_of_slot = [n for n, slots in enumerate(pool.store) for _ in range(slots)]
    for size in sizes:
        taken = slice(start, start + size)
        per_node = [node_of_slot[taken].count(n) for n in dict.fromkeys(node_of_slot[taken])]
        parts.append(SubRayResourcePool([pool], partial(_bundles_of, pool, taken), per_node))
        start += size
    return parts


def _bundles_of(pool: RayResourcePool, taken: slice) -> list[Bundle]:
    return pool.bundles()[taken]


def merge_resource_pool(a: RayResourcePool, b: RayResourcePool) -> SubRayResourcePool:
    """The slots of both pools, those of `a` first."""
    if (a.device, a.max_colocate_count) != (b.device, b.max_colocate_count):
        raise ConfigError(
            f"cannot merge a pool of {a.device} slots (max_colocate_count {a.max_colocate_count}) with one of {b.device} slots "
            f"(max_colocate_count {b.max_colocate_count})",
            "make both pools with the same device and max_colocate_count",
        )
    return SubRayResourcePool([a, b], lambda: a.bundles() + b.bundles(), [*a.store, *b.store])


@dataclass
class ResourcePoolManager:
    """Named pools, and which role lives in which.

    Args:
        resource_pool_spec: e.g. `{"global_pool": [8, 8]}`: eight slots on each of two nodes.
        mapping: role -> pool name.
        device: cuda, npu or cpu; by default what the cluster has.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Any, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    device: str | None = None
    cpus_per_slot: float = 1.0
    wait_s: float = 0.0
    max_colocate_count: int = 3

    def __post_init__(self) -> None:
        for role, home in self.mapping.items():
            self._require(role, home)
        for pool, sizes in self.resource_pool_spec.items():
            if not sizes:
                raise ConfigError(f"pool {pool!r} has no nodes", "give the slots per node, e.g. [8, 8]")

    def check_resources(self) -> None:
        """ResourceError unless all pools fit the cluster together; nothing is reserved."""
        allow_connections(self.get_n_gpus())
        self._reserve(self._new_pools())

    def create_resource_pool(self) -> None:
        """Check that all pools fit the cluster together, then make them, unless `start_early` has done so. Nothing is left
        behind if that fails."""
        for role, home in self.mapping.items():
            self._require(role, home)
        if self.resource_pool_dict:
            return
        allow_connections(self.get_n_gpus())
        pools = self._new_pools()
        nodes = iter(self._reserve(pools))
        try:
            for pool in pools.values():
                pool.get_placement_groups([next(nodes) for _ in pool.store])
        except ResourceError:
            for pool in pools.values():
                pool.shutdown()
            raise
        self.resource_pool_dict.update(pools)
        together = Counter[str]()
        for pool in pools.values():
            together.update(pool.node_slots)
        for pool in pools.values():
            pool.node_slots = dict(together)

    def start_early(self, preparation: str) -> None:
        """Make the pools and start the processes of all their slots, which call `preparation`, a `module:function`."""
        self.create_resource_pool()
        for pool in self.resource_pool_dict.values():
            pool.start_early(preparation)

    def _new_pools(self) -> dict[str, RayResourcePool]:
        return {
            name: RayResourcePool(
                sizes,
                name_prefix=f"{name}_{secrets.token_hex(3)}_",
                max_colocate_count=self.max_colocate_count,
                device=self.device,
                cpus_per_slot=self.cpus_per_slot,
            )
            for name, sizes in self.resource_pool_spec.items()
        }

    def _reserve(self, pools: Mapping[str, RayResourcePool]) -> list[Node]:
        return reserve_nodes([d for name, pool in pools.items() for d in pool.demands(name)], self.wait_s)

    def _require(self, role: Any, pool: str) -> None:
        if pool not in self.resource_pool_spec:
            raise ConfigError(
                f"role {role} is mapped to the pool {pool!r}, which does not exist",
                f"map it to one of {', '.join(self.resource_pool_spec) or '(no pool is defined)'}",
            )

    def get_resource_pool(self, role: Hashable) -> RayResourcePool:
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Slots in all pools."""
        return sum(sum(sizes) for sizes in self.resource_pool_spec.values())

    def shutdown(self) -> None:
        for pool in self.resource_pool_dict.values():
            pool.shutdown()
        self.resource_pool_dict.clear()


def _make_groups(pool: RayResourcePool, nodes: Sequence[Node]) -> list[PlacementGroup]:
    groups = []
    target_by_id = "_soft_target_node_id" in signature(placement_group).parameters
    for number, (demand, node) in enumerate(zip(pool.demands(), nodes)):
        bundle = {resource: amount / demand.slots for resource, amount in demand.need.items()}
        target = {"_soft_target_node_id": node.node_id} if target_by_id else {}
        groups.append(
            placement_group(
                [dict(bundle) for _ in range(demand.slots)],
                strategy="STRICT_PACK",
                name=f"{pool.name_prefix}{number}",
                lifetime="detached" if pool.detached else None,
                **target,
            )
        )
    deadline = time.monotonic() + max(PLACEMENT_TIMEOUT_S, pool.wait_s)
    for group in groups:
        if not group.wait(max(0.0, deadline - time.monotonic())):
            lost = lost_nodes(nodes)
            error = (
                node_lost_error(lost, pool.name_prefix.rstrip("_"))
                if lost
                else shortage(pool.demands(), cluster_nodes())
            )
            for made in groups:
                remove_placement_group(made)
            raise error
    return _in_stable_order(groups, pool.store)


def _in_stable_order(groups: list[PlacementGroup], sizes: Sequence[int]) -> list[PlacementGroup]:
    """Groups of equal size ordered by the address of their node, so that ranks are the same after a restart."""
    order = {n.node_id: i for i, n in enumerate(cluster_nodes())}

    def node_number(group: PlacementGroup) -> int:
        return order.get(_node_of(group).node_id, len(order))

    by_size: dict[int, list[PlacementGroup]] = {}
    for group, size in zip(groups, sizes):
        by_size.setdefault(size, []).append(group)
    for same in by_size.values():
        same.sort(key=node_number)
    return [by_size[size].pop(0) for size in sizes]


def _node_of(group: PlacementGroup) -> Node:
    """Where a group was placed."""
    table: dict[str, Any] = placement_group_table(group)
    node_id = next(iter(table["bundles_to_node_id"].values()), "")
    return next((n for n in cluster_nodes() if n.node_id == node_id), Node(node_id, "unknown", {}, {}))


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


SPARE = 256
"""Files, pipes and connections that a driver has besides those to its workers."""
ENOUGH = 65_536


def allow_connections(workers: int) -> None:
    """Raise this process's limit of open files as far as needed. ResourceError if it may not be raised so far."""
    needed = 2 * workers + SPARE  # one a worker was measured; a second one comes and goes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ResourceError(
            f"the driver needs about {needed} open files for {workers} workers, and may have {hard}",
            f"start Ray on its node after `ulimit -n {ENOUGH}` (the limit may be in /etc/security/limits.conf)",
        )
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, max(needed, ENOUGH))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
