"""The driver of a PPO-family run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quadriga.config.schema import Config
from quadriga.controller.group import WorkerGroup
from quadriga.controller.members import RayClassWithInitArgs, create_colocated_worker_cls
from quadriga.controller.ray_pool import ResourcePoolManager
from quadriga.trainer.ppo.role import Role
from quadriga.workers.base import WorkerReport

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role"]


class RayPPOTrainer:
    """Holds the worker groups of a run and steers them.

    Args:
        config: the checked configuration.
        role_worker_mapping: worker class of each role that the run has.
        resource_pool_manager: the pools, and which role lives in which.
        ray_worker_group_cls: `RayWorkerGroup`, or `LocalWorkerGroup` to run in this process.
    """

    def __init__(
        self,
        config: Config,
        role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: Any,
    ) -> None:
        self.config = config
        self.role_worker_mapping = dict(role_worker_mapping)
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.worker_groups: dict[Role, WorkerGroup] = {}
        self._hosts: list[Any] = []

    def init_workers(self) -> list[WorkerReport]:
        """Make the pools, start one process per slot, and let every role join its collectives.

        The roles of a pool share its processes. All processes of all pools start at the same time.
        """
        manager = self.resource_pool_manager
        manager.create_resource_pool()
        by_pool: dict[str, dict[Role, RayClassWithInitArgs]] = {}
        for role, worker_class in self.role_worker_mapping.items():
            member = RayClassWithInitArgs(worker_class, config=self.config, role=str(role))
            by_pool.setdefault(manager.mapping[role], {})[role] = member
        for pool_name, members in by_pool.items():
            host = self.ray_worker_group_cls(
                resource_pool=manager.resource_pool_dict[pool_name],
                ray_cls_with_init=create_colocated_worker_cls(members),
                start_timeout_s=self.config.controller.start_timeout_s,
                call_timeout_s=self.config.controller.call_timeout_s,
            )
            self._hosts.append(host)
            spawned = host.spawn(members)
            self.worker_groups.update({role: spawned[str(role)] for role in members})
        for host in self._hosts:
            host.launch()
        for host in self._hosts:
            host.wait_ready()
        return [report for group in self.worker_groups.values() for report in group.join()]  # type: ignore[attr-defined]

    def shutdown(self) -> None:
        """Stop all workers and give the pools back."""
        for host in self._hosts:
            host.shutdown()
        self._hosts.clear()
        self.worker_groups.clear()
        self.resource_pool_manager.shutdown()
