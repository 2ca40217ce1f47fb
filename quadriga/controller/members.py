"""What a worker group is made of: worker classes with the arguments to construct them, alone or several to a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quadriga.errors import ConfigError


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
