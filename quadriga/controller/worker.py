"""The base class of workers: one process of a group, which knows its place and can join the others in collectives."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from quadriga.accelerator import collectives, use
from quadriga.controller.rendezvous import SECRET, join
from quadriga.errors import ResourceError, WorkerError

NOSET_VARIABLES = tuple(
    f"RAY_EXPERIMENTAL_NOSET_{name}"
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "NEURON_RT_VISIBLE_CORES",
        "TPU_VISIBLE_CHIPS",
        "ONEAPI_DEVICE_SELECTOR",
    )
)
"""With one of these set, Ray leaves all devices of the node visible to every worker."""

PROTECTED_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RAY_LOCAL_RANK",
        "RAY_LOCAL_WORLD_SIZE",
        "WG_PREFIX",
        "WG_BACKEND",
        "QUADRIGA_DEVICE",
        SECRET,
    }
)
"""Set by the group for each worker; a user's `worker_env` must not touch them."""


def ray_noset_visible_devices(env: Any = None) -> bool:
    """Whether Ray was told not to restrict each worker to its own device."""
    env = os.environ if env is None else env
    return any(env.get(name) for name in NOSET_VARIABLES)


class Worker:
    """One member of a worker group. Subclasses add methods marked with `@register`.

    The group has put the worker's place into the environment: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, the node's
    RAY_LOCAL_RANK and RAY_LOCAL_WORLD_SIZE, and LOCAL_RANK. LOCAL_RANK is the number of the device that torch must use:
    the rank on the node where all devices are visible, 0 where Ray shows each worker its own device only.
    """

    def __init__(self) -> None:
        missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
        if missing:
            raise WorkerError(
                f"{type(self).__name__} cannot find its place: {', '.join(missing)} not set",
                "make workers through RayWorkerGroup, LocalWorkerGroup or torchrun, which set these variables",
            )
        _refuse_conflicting_visibility(os.environ)
        self._rank = int(os.environ["RANK"])
        self._world_size = int(os.environ["WORLD_SIZE"])
        self._local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._device = os.environ.get("QUADRIGA_DEVICE", "cpu")
        self._dispatch_infos: dict[str, tuple[int, bool]] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def local_rank(self) -> int:
        return self._local_rank

    @property
    def local_world_size(self) -> int:
        return self._local_world_size

    @property
    def device_name(self) -> str:
        """`cuda`, `npu` or `cpu`."""
        return self._device

    def get_master_addr_port(self) -> tuple[str, str]:
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def init_process_group(self, timeout_s: float = 600.0) -> None:
        """Join the group's collectives (gloo, and the device's own), once per process.

        DIST_INIT_METHOD, where set, says how the ranks find each other; else MASTER_ADDR and MASTER_PORT do.
        """
        import torch

        self.use_own_device()
        if torch.distributed.is_initialized():
            return
        if method := os.environ.get("DIST_INIT_METHOD"):
            torch.distributed.init_process_group(
                backend=collectives(self._device),
                init_method=method,
                rank=self._rank,
                world_size=self._world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        else:
            join(self._device, self._rank, self._world_size, timeout_s)

    def use_own_device(self) -> None:
        """Let torch use the device of this worker's slot."""
        use(f"{self._device}:{self._local_rank}")

    def register_dispatch_info(self, mesh_name: str, dp_rank: int, is_collect: bool = True) -> None:
        """Tell the group this worker's data-parallel rank in a mesh, and whether its answer is one to keep."""
        self._dispatch_infos[mesh_name] = (dp_rank, is_collect)

    def get_dispatch_info(self, mesh_name: str) -> tuple[int, bool]:
        if mesh_name not in self._dispatch_infos:
            raise WorkerError(
                f"{type(self).__name__} rank {self._rank} has no place in the mesh {mesh_name!r}",
                f"call self.register_dispatch_info({mesh_name!r}, dp_rank, is_collect) in its constructor",
            )
        return self._dispatch_infos[mesh_name]


def _refuse_conflicting_visibility(env: Any) -> None:
    cuda, hip, rocr = (env.get(f"{n}_VISIBLE_DEVICES") for n in ("CUDA", "HIP", "ROCR"))
    if rocr and (cuda or hip):
        raise ResourceError(
            "ROCR_VISIBLE_DEVICES is set together with CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES: they would count devices "
            "in different orders",
            "unset ROCR_VISIBLE_DEVICES",
        )
    if hip and cuda and hip != cuda:
        raise ResourceError(
            f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} disagree",
            "unset one of them, or make them equal",
        )
