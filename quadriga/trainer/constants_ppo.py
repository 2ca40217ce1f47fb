"""Environment variables that every process of a run gets unless the user has set them."""

from __future__ import annotations

import os
from typing import Any

DEFAULT_ENV_VARS = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "NCCL_CUMEM_ENABLE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    # glibc gives threads heaps of their own, eight for each core; what one of them freed is of no use to the others, and a
    # worker with dozens of threads grows by that for hundreds of steps.
    "MALLOC_ARENA_MAX": "4",
}

PPO_RAY_RUNTIME_ENV = {"env_vars": DEFAULT_ENV_VARS}
"""All of them, for mains that merge it themselves."""

RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by `ray job submit`, which may bring a working directory of its own."""


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """The default `runtime_env` of a run.

    A variable that is already in the driver's environment is left out: local processes inherit the user's value.
    `working_dir: None` keeps Ray from packing the current folder, unless a Ray job has chosen one.
    """
    runtime_env: dict[str, Any] = {"env_vars": {k: v for k, v in DEFAULT_ENV_VARS.items() if k not in os.environ}}
    if "working_dir" not in os.environ.get(RAY_JOB_CONFIG, ""):
        runtime_env["working_dir"] = None
    return runtime_env
