"""Values that one process leaves for others: in Ray's object store; in a run without Ray there is only one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from quadriga.protocol import Store


def put(value: Any) -> Any:
    """A handle to `value`. It can be sent to any process of the run; the memory is freed when the last one drops it."""
    ray = _running_ray()
    return value if ray is None else ray.put(value)


def get(handles: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """The values behind `handles`. Arrays in them are views of shared memory: read-only, and not copied."""
    ray = _running_ray()
    return list(handles) if ray is None else ray.get(list(handles), timeout=timeout_s)


def copies() -> bool:
    """Whether what is put is a copy. Without Ray it is the value itself, and changes when the value does."""
    return _running_ray() is not None


def _running_ray() -> Any:
    ray = sys.modules.get("ray")  # a run without it need not import it
    return ray if ray is not None and ray.is_initialized() else None


STORE = Store(put, get)
"""For `DataProto.leave_in_store`."""
