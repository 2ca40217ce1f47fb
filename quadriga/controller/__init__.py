"""The single controller: pools of slots, groups of workers in them, and how calls are dealt out. Knows nothing of RL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

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
    from quadriga.controller.pool import RayClassWithInitArgs, ResourcePool, create_colocated_worker_cls
    from quadriga.controller.ray_group import RayWorkerGroup
    from quadriga.controller.ray_pool import (
        RayResourcePool,
        ResourcePoolManager,
        SubRayResourcePool,
        merge_resource_pool,
        split_resource_pool,
    )
    from quadriga.controller.worker import Worker

__all__, __getattr__ = lazy_names(__name__, __file__)
