"""A worker group in the calling process: the same surface as on Ray, for a debugger and for reading."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from quadriga.controller.call_record import CallMeter, CallRecord, around_call
from quadriga.controller.device_gate import DEVICE_GATE
from quadriga.controller.group import WorkerGroup
from quadriga.controller.placement_env import rank_environments, refuse_protected
from quadriga.controller.pool import RayClassWithInitArgs, ResourcePool, role_and_method, roles_of
from quadriga.errors import ConfigError, WorkerError


class LocalResourcePoolManager:
    """Named pools and which role lives in which, as `ResourcePoolManager`, for slots that all are this process."""

    def __init__(self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[Any, str]) -> None:
        self.resource_pool_spec, self.mapping = resource_pool_spec, mapping
        self.resource_pool_dict: dict[str, ResourcePool] = {}

    def check_resources(self) -> None:
        """Nothing: this process is there."""

    def create_resource_pool(self) -> None:
        self.resource_pool_dict = {name: ResourcePool(sizes) for name, sizes in self.resource_pool_spec.items()}

    def get_n_gpus(self) -> int:
        """Slots in all pools."""
        return sum(sum(sizes) for sizes in self.resource_pool_spec.values())

    def shutdown(self) -> None:
        self.resource_pool_dict = {}


class LocalWorkerGroup(WorkerGroup):
    """One slot in this very process. Calls run when they are waited for: breakpoints work, nothing is copied, errors come
    as they are.

    Args:
        resource_pool: as on Ray; it must have one slot, since a process can be only one rank.
        ray_cls_with_init: a `RayClassWithInitArgs`, or what `create_colocated_worker_cls` made.
        device_name: cuda, npu or cpu.
        worker_env: environment variables, set in this process.
    """

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        device_name: str = "cpu",
        worker_env: Mapping[str, str] | None = None,
        **_same_call_as_on_ray: Any,
    ) -> None:
        if ray_cls_with_init is None:
            raise ConfigError(
                "a LocalWorkerGroup needs ray_cls_with_init", "LocalWorkerGroup(None, RayClassWithInitArgs(MyWorker))"
            )
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ConfigError(
                f"{resource_pool.world_size} ranks cannot share one process",
                "use one slot (trainer.nnodes=1, trainer.n_gpus_per_node=1) with trainer.executor=local, or trainer.executor=ray",
            )
        refuse_protected(worker_env or {})
        self.world_size, self.device_name = 1, device_name
        self._roles, self._prefixed = roles_of(ray_cls_with_init)
        os.environ.update({**dict(worker_env or {}), **_environment(device_name)})
        self._workers = {role: m.worker_class(*m.args, **m.kwargs) for role, m in self._roles.items()}
        self._closed = False
        self._calls: list[CallRecord] = []
        for role, member in self._roles.items():
            self.bind(member.worker_class, f"{role}_" if self._prefixed else "")

    @property
    def workers(self) -> list[Any]:
        """The worker object itself (of the first role)."""
        return [next(iter(self._workers.values()))]

    def launch(self) -> None:
        """Nothing: the workers are there."""

    def wait_ready(self) -> None:
        """Nothing: the workers are there."""

    def spawn(self, prefix_set: Iterable[Any]) -> dict[str, LocalWorkerGroup]:
        """A group for each role of a colocated one; methods lose their role prefix."""
        groups = {}
        for role in map(str, prefix_set):
            if not self._prefixed or role not in self._roles:
                raise ConfigError(f"this group has no role {role!r}", f"its roles are {', '.join(self._roles)}")
            group = object.__new__(LocalWorkerGroup)
            group.world_size, group.device_name, group._closed = 1, self.device_name, False
            group._roles, group._prefixed = {role: self._roles[role]}, False
            group._workers = {role: self._workers[role]}
            group._calls = self._calls
            group.bind(self._roles[role].worker_class)
            groups[role] = group
        return groups

    def shutdown(self) -> None:
        self._closed = True
        self._workers = {}

    def is_alive(self) -> bool:
        return not self._closed

    def death(self, during: str, timeout_s: float = 5.0) -> None:
        """None: the worker dies with whoever asks."""

    def ask(self, method: str, *args: Any, timeout_s: float = 10.0) -> list[Any]:
        """What a method of the worker answers, also from another thread than the one that is busy with a call."""
        role, method = role_and_method(self._roles, self._prefixed, method)
        return [getattr(self._workers[role], method)(*args)]

    def take_calls(self, timeout_s: float = 10.0) -> list[list[CallRecord]]:
        """What the worker has done since the last time."""
        taken, self._calls[:] = self._calls[:], []
        return [taken]

    def prepare_call(self) -> None:
        if self._closed:
            raise WorkerError("the workers are gone: the group was shut down", "make a new worker group")

    def submit(self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _Deferred(partial(self._call_now, method, args, kwargs))

    def fetch(self, pending: list[Any], method: str, timeout_s: float | None = None) -> list[Any]:
        return [call.result() if isinstance(call, _Deferred) else call for call in pending]

    def _call_now(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        role, method = role_and_method(self._roles, self._prefixed, method)
        meter = CallMeter(role, method)
        worker = self._workers[role]
        with DEVICE_GATE.call(), around_call(worker, method):
            result = getattr(worker, method)(*args, **kwargs)
            result = asyncio.run(result) if asyncio.iscoroutine(result) else result
        self._calls.append(meter.record())
        return result


class _Deferred:
    """A call that is made when somebody waits for it: whoever measures the wait measures the call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._result: Any = None

    def result(self) -> Any:
        if self._call is not None:
            call, self._call = self._call, None
            self._result = call()
        return self._result


def _environment(device: str) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "node_id": "local",
        "node_ip": "127.0.0.1",
        "interfaces": [name for _, name in socket.if_nameindex()],
        "cores": len(os.sched_getaffinity(0)),
        "noset": [],
        "accelerator_ids": {},
        "chosen_interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    (variables,) = rank_environments([place], device, "", port=port)
    return {**variables, "WG_BACKEND": "local"}
