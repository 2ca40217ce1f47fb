"""A resource pool: how many worker slots on how many nodes, and the worker classes that are put in them. Nothing here knows Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.errors import ConfigError


class ResourcePool:
    """Slots per node, e.g. `[8, 8]`: two nodes with eight slots each. A slot is one device and one process on it.

    Args:
        process_on_nodes: slots on each node; entries may differ.
        max_colocate_count: how many worker groups may share a slot, each with processes of its own.
        n_gpus_per_node: devices that a node has; for information only.
    """

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store: list[int] = []
        for slots in process_on_nodes or ():
            self.add_node(slots)
        if max_colocate_count < 1:
            raise ConfigError(f"max_colocate_count is {max_colocate_count}", "give at least 1")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        if isinstance(process_count, bool) or not isinstance(process_count, int) or process_count < 1:
            raise ConfigError(
                f"a pool cannot have {process_count!r} slots on a node", "give a whole number of at least 1 per node"
            )
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        return sum(self._store)

    @property
    def store(self) -> list[int]:
        return self._store

    def __call__(self) -> list[int]:
        return self._store

    def local_world_size_list(self) -> list[int]:
        """For each rank, how many ranks its node has."""
        return [slots for slots in self._store for _ in range(slots)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number among the ranks of its node."""
        return [local for slots in self._store for local in range(slots)]


class RayClassWithInitArgs:
    """A worker class, plain or made by `ray.remote`, and the arguments to construct it with, later and elsewhere."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args, self.kwargs = args, kwargs
        self.options: dict[str, Any] = {}
        self.additional_resources: dict[str, float] = {}

    @property
    def worker_class(self) -> type:
        return getattr(self.cls, "__ray_actor_class__", self.cls)

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Ray actor options for the processes, such as `runtime_env`."""
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Further Ray resources that each process takes."""
        self.additional_resources.update(additional_resource)


class ColocatedWorkers(RayClassWithInitArgs):
    """Several worker classes that share one process per slot, each under its role."""

    def __init__(self, roles: Mapping[str, RayClassWithInitArgs]) -> None:
        if not roles:
            raise ConfigError("no roles to colocate", "give at least one role")
        super().__init__(next(iter(roles.values())).cls)
        self.roles = dict(roles)
        for member in roles.values():
            self.options.update(member.options)
            self.additional_resources.update(member.additional_resources)


def create_colocated_worker_cls(class_dict: Mapping[Any, RayClassWithInitArgs]) -> ColocatedWorkers:
    """Put the workers of several roles into one process per slot. `RayWorkerGroup.spawn` gives a group per role."""
    return ColocatedWorkers({str(role): member for role, member in class_dict.items()})


def roles_of(members: RayClassWithInitArgs) -> tuple[dict[str, RayClassWithInitArgs], bool]:
    """The roles of a group, and whether its methods carry their role as a prefix."""
    if isinstance(members, ColocatedWorkers):
        return members.roles, True
    return {members.worker_class.__name__: members}, False


def role_and_method(roles: Mapping[str, RayClassWithInitArgs], prefixed: bool, method: str) -> tuple[str, str]:
    """Which role a call by name is for; a name without a role's prefix goes to the first one."""
    if prefixed:
        for role in sorted(roles, key=len, reverse=True):
            if method.startswith(f"{role}_"):
                return role, method[len(role) + 1 :]
    return next(iter(roles)), method
