"""Devices: by name with their memory, for a plan that is made elsewhere; and which one this machine has."""

from __future__ import annotations

import difflib
import importlib.util
import os
from pathlib import Path

from quadriga.errors import ConfigError

GIB = 1 << 30
GPUS = {
    "rtx3090-24g": 24 * GIB,
    "rtx4090-24g": 24 * GIB,
    "rtx5090-32g": 32 * GIB,
    "l4-24g": 23 * GIB,
    "a10-24g": 23 * GIB,
    "l40s-48g": 45 * GIB,
    "a6000-48g": 48 * GIB,
    "v100-32g": 32 * GIB,
    "a100-40g": 40 * GIB,
    "a100-80g": 80 * GIB,
    "h100-80g": 80 * GIB,
    "h200-141g": 140 * GIB,
    "gh200-96g": 95 * GIB,
    "b200-180g": 179 * GIB,
    "910b-64g": 64 * GIB,
}
"""Bytes that the driver reports, rounded down."""


def gpu_memory(name: str) -> int:
    """Bytes of the device of that name. ConfigError for a name that is not in the table."""
    known = name.lower().replace("_", "-")
    if known in GPUS:
        return GPUS[known]
    near = difflib.get_close_matches(known, GPUS, n=1) or [n for n in GPUS if n.startswith(known.split("-")[0])][:1]
    raise ConfigError(
        f"the GPU {name!r} is not in the table of devices",
        (f"did you mean {near[0]}? " if near else "") + f"known are {', '.join(GPUS)}",
    )


DEVICE_FILES = {"cuda": ("nvidia[0-9]*", "kfd", "dxg"), "npu": ("davinci[0-9]*",)}
"""What an accelerator shows up as in /dev."""


def detect_local_device() -> str:
    """cuda, npu or cpu: the first that this machine has and torch was built for."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if not hidden and _has_device("cuda") and _torch_is_built_for_gpus():
        return "cuda"
    return "npu" if _has_device("npu") and importlib.util.find_spec("torch_npu") else "cpu"


def _has_device(name: str) -> bool:
    return any(any(Path("/dev").glob(pattern)) for pattern in DEVICE_FILES[name])


def _torch_is_built_for_gpus() -> bool:
    package = importlib.util.find_spec("torch")
    if package is None or not package.submodule_search_locations:
        return False
    at = Path(package.submodule_search_locations[0]) / "version.py"
    spec = importlib.util.spec_from_file_location("torch_version", at)
    if spec is None or spec.loader is None:
        return False
    version = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(version)
    return bool(getattr(version, "cuda", None) or getattr(version, "hip", None))
