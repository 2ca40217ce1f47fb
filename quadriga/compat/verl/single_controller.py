"""`verl.single_controller`: workers, groups, pools and dispatch, with the few names that are other ones here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quadriga.controller import (
    Dispatch,
    Execute,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePool,
    ResourcePoolManager,
    SubRayResourcePool,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    merge_resource_pool,
    register,
    register_dispatch_mode,
    split_resource_pool,
    update_dispatch_mode,
)
from quadriga.controller import RayClassWithInitArgs as _RayClassWithInitArgs
from quadriga.controller import Worker as _Worker
from quadriga.controller.dispatch import MARK as MAGIC_ATTR
from quadriga.controller.dispatch import MODES, DispatchMode
from quadriga.controller.group import WorkerGroup

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "MAGIC_ATTR",
    "ClassWithInitArgs",
    "Dispatch",
    "Execute",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "Worker",
    "WorkerGroup",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "update_dispatch_mode",
]


class Worker(_Worker):
    """A member of a worker group, with verl's ways to say its place in a mesh."""

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        if mesh_name in self._dispatch_infos:
            raise ValueError(f"the mesh {mesh_name!r} has been registered already")
        self.register_dispatch_info(mesh_name, dp_rank, is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """The data-parallel rank of this worker in a mesh."""
        return self.get_dispatch_info(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Whether the answers of this worker count."""
        return self.get_dispatch_info(mesh_name)[1]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """The ranks and the answering of all meshes, as `set_dispatch_collect` takes them."""
        return {
            "dispatch_dp_rank": {mesh: rank for mesh, (rank, _) in self._dispatch_infos.items()},
            "collect_dp_rank": {mesh: collects for mesh, (_, collects) in self._dispatch_infos.items()},
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_dispatch_collect(self, mesh_name: str, dispatch_dp_rank: int, collect_dp_rank: bool) -> None:
        """Take over the place that another worker of this process has in a mesh."""
        self.register_dispatch_info(mesh_name, dispatch_dp_rank, bool(collect_dp_rank))


class RayClassWithInitArgs(_RayClassWithInitArgs):
    """A worker class with its arguments. A class of `create_colocated_worker_raw_cls` stands for all roles in it."""

    def __new__(own, /, *args: Any, **kwargs: Any) -> Any:
        given: Any = kwargs.get("cls", args[0] if args else None)
        roles = getattr(getattr(given, "__ray_actor_class__", given), "colocated_roles", None)
        if roles is not None:
            return create_colocated_worker_cls(roles)
        return super().__new__(own)


ClassWithInitArgs = RayClassWithInitArgs


def create_colocated_worker_raw_cls(class_dict: Mapping[Any, _RayClassWithInitArgs]) -> type:
    """A class for `RayClassWithInitArgs` (or `ray.remote` before it) that holds the workers of several roles."""
    name = "Colocated_" + "_".join(str(role) for role in class_dict)
    return type(name, (Worker,), {"colocated_roles": dict(class_dict)})


dispatch_one_to_all, collect_all_to_all = MODES[Dispatch.ONE_TO_ALL].dispatch_fn, MODES[Dispatch.ONE_TO_ALL].collect_fn
dispatch_all_to_all = MODES[Dispatch.ALL_TO_ALL].dispatch_fn
dispatch_dp_compute, collect_dp_compute = MODES[Dispatch.DP_COMPUTE].dispatch_fn, MODES[Dispatch.DP_COMPUTE].collect_fn
dispatch_dp_compute_data_proto = MODES[Dispatch.DP_COMPUTE_PROTO].dispatch_fn
collect_dp_compute_data_proto = MODES[Dispatch.DP_COMPUTE_PROTO].collect_fn
dispatch_dp_compute_data_proto_with_func = MODES[Dispatch.DP_COMPUTE_PROTO_WITH_FUNC].dispatch_fn


class _PairsOfModes(Mapping[Any, dict[str, Any]]):
    """The modes as verl's registry shows them: a name → its pair of functions."""

    def __getitem__(self, name: Any) -> dict[str, Any]:
        return get_predefined_dispatch_fn(name)

    def __iter__(self) -> Iterator[Any]:
        return iter(MODES)

    def __len__(self) -> int:
        return len(MODES)


DISPATCH_MODE_FN_REGISTRY = _PairsOfModes()

create_colocated_worker_cls_fused = create_colocated_worker_cls


def get_predefined_dispatch_fn(dispatch_mode: Any) -> dict[str, Any]:
    """The pair of functions of a mode: `{"dispatch_fn": …, "collect_fn": …}`."""
    mode = dispatch_mode if isinstance(dispatch_mode, DispatchMode) else MODES[dispatch_mode]
    return {"dispatch_fn": mode.dispatch_fn, "collect_fn": mode.collect_fn}


def get_predefined_execute_fn(execute_mode: str) -> dict[str, str]:
    """The name of the group's method that runs a call on these ranks."""
    return {"execute_fn_name": "execute_rank_zero" if execute_mode == Execute.RANK_ZERO else "execute_all"}
