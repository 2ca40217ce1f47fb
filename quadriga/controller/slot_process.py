"""Starting the process of a slot, either for a worker group that is there already or ahead of it.

Ahead: what takes longest in a worker's life before its first work is importing libraries. So the processes of a pool may be
started, and told what to import, while the driver still reads its data; the first worker group in the pool moves into them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quadriga.controller.placement_env import rank_environments
from quadriga.controller.resources import RESOURCE_OF_DEVICE
from quadriga.controller.slot import SlotActor
from quadriga.errors import ResourceError

if TYPE_CHECKING:
    from quadriga.controller.ray_pool import Bundle, RayResourcePool

START_TIMEOUT_S = 300.0


def start_process(
    pool: RayResourcePool,
    bundle: Bundle,
    name: str,
    label: str,
    detached: bool = False,
    additional_resources: Mapping[str, float] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The handle of a new process in a slot; `label` says for whom, should it not fit."""
    share = 1 / pool.max_colocate_count
    accelerator = RESOURCE_OF_DEVICE[pool.device]
    resources = dict(additional_resources or {})
    if accelerator not in (None, "GPU"):
        resources[str(accelerator)] = share
    chosen: dict[str, Any] = {
        "num_cpus": pool.cpus_per_slot * share,
        "num_gpus": share if accelerator == "GPU" else 0,
        "resources": resources or None,
        "name": name,
        "lifetime": "detached" if detached else None,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(bundle.group, bundle.index, True),
        **(options or {}),
    }
    try:
        return SlotActor.options(**chosen).remote()
    except ValueError as error:
        raise ResourceError(
            f"a worker of {label} does not fit into a slot of its pool: {error}",
            "slots hold CPUs and one device; ask for what they have, or give the pool an accelerator_type",
        ) from None


class EarlyProcesses:
    """The processes of a pool, one for each slot, before any worker group has asked for them.

    Args:
        preparation: `module:function`, called in each of them as soon as its environment is set. What it raises is
            forgotten: a worker that needs what failed will raise it again, where somebody listens.
    """

    def __init__(self, pool: RayResourcePool, preparation: str) -> None:
        self._free: dict[tuple[int, int], tuple[str, Any]] = {}
        for bundle in pool.bundles():
            name = f"{pool.name_prefix}slot_{bundle.group_number}:{bundle.index}"
            handle = start_process(pool, bundle, name, pool.name_prefix.rstrip("_"))
            self._free[bundle.group_number, bundle.index] = name, handle
        handles = [handle for _, handle in self._free.values()]
        arguments = (handles, pool.device, dict(pool.node_slots), preparation)
        threading.Thread(target=_prepare, args=arguments, daemon=True, name="early-processes").start()

    def take(self, bundle: Bundle) -> tuple[str, Any] | None:
        """Name and handle of the process in this slot, for the first who asks."""
        return self._free.pop((bundle.group_number, bundle.index), None)


def _prepare(handles: list[Any], device: str, node_slots: Mapping[str, int], preparation: str) -> None:
    try:
        places = ray.get([handle.where.remote() for handle in handles], timeout=START_TIMEOUT_S)
        environments = rank_environments(places, device, "", node_slots)
    except (ray.exceptions.RayError, RuntimeError, ResourceError):
        return  # the group that moves in finds out why
    # Ranks are not given out yet; the number of threads, which libraries read when they are loaded, is known.
    for handle, variables in zip(handles, environments):
        early = {k: v for k, v in variables.items() if k.endswith("_NUM_THREADS") or k == "QUADRIGA_DEVICE"}
        handle.prepare.remote(early, preparation)
