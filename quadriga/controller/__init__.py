"""The single controller: pools of slots, groups of workers in them, and how calls are dealt out. Knows nothing of RL."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.controller.dispatch import (
        Dispatch,
        Execute,
        make_nd_compute_dataproto_dispatch_fn,
        register,
        register_dispatch_mode,
        update_dispatch_mode,
    )
    from quadriga.controller.local_group import LocalWorkerGroup
    from quadriga.controller.members import RayClassWithInitArgs, create_colocated_worker_cls
    from quadriga.controller.pool import ResourcePool
    from quadriga.controller.ray_group import RayWorkerGroup
    from quadriga.controller.ray_pool import (
        RayResourcePool,
        ResourcePoolManager,
        SubRayResourcePool,
        merge_resource_pool,
        split_resource_pool,
    )
    from quadriga.controller.worker import Worker

_HOME = {
    "dispatch": (
        "Dispatch",
        "Execute",
        "make_nd_compute_dataproto_dispatch_fn",
        "register",
        "register_dispatch_mode",
        "update_dispatch_mode",
    ),
    "local_group": ("LocalWorkerGroup",),
    "members": ("RayClassWithInitArgs", "create_colocated_worker_cls"),
    "pool": ("ResourcePool",),
    "ray_group": ("RayWorkerGroup",),
    "ray_pool": (
        "RayResourcePool",
        "ResourcePoolManager",
        "SubRayResourcePool",
        "merge_resource_pool",
        "split_resource_pool",
    ),
    "worker": ("Worker",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Dispatch",
    "Execute",
    "LocalWorkerGroup",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "SubRayResourcePool",
    "Worker",
    "create_colocated_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "update_dispatch_mode",
]


def __getattr__(name: str) -> Any:
    """Ray is imported only by those who name something that needs it."""
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"quadriga.controller.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'quadriga.controller' has no attribute {name!r}")
