"""Which device this machine has, told by device files and torch's own note of what it was built for.

Loading torch to ask it would take seconds, before anything else can start.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

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
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return False
    at = Path(found.submodule_search_locations[0]) / "version.py"
    spec = importlib.util.spec_from_file_location("torch_version", at)
    if spec is None or spec.loader is None:
        return False
    version = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(version)
    return bool(getattr(version, "cuda", None) or getattr(version, "hip", None))
