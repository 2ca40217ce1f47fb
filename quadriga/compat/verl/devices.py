"""`verl.utils.device`, `verl.utils.profiler`, `verl.utils.memory_utils`: which accelerator there is, and what a stretch of code takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, TypeVar

import torch

from quadriga.accelerator import device_module, empty_cache
from quadriga.config.devices import detect_local_device
from quadriga.trainer.before_start import auto_set_device

__all__ = [
    "DistProfiler",
    "DistProfilerExtension",
    "GPUMemoryLogger",
    "aggressive_empty_cache",
    "auto_set_device",
    "get_device_id",
    "get_device_name",
    "get_nccl_backend",
    "get_torch_device",
    "get_visible_devices_keyword",
    "is_cuda_available",
    "is_npu_available",
    "log_gpu_memory_usage",
    "log_print",
    "mark_annotate",
    "mark_end_range",
    "mark_start_range",
    "marked_timer",
    "simple_timer",
]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_LOG = logging.getLogger(__name__)

is_cuda_available = detect_local_device() == "cuda"
is_npu_available = False
"""Ascend devices are not used."""


def get_device_name() -> str:
    """`cuda`, `npu` or `cpu`."""
    return detect_local_device()


def get_torch_device() -> ModuleType:
    """torch's module of the accelerator; `torch.cpu` without one."""
    return device_module(torch.device(get_device_name()))


def get_device_id() -> int:
    """The number of the device in use; 0 on a CPU."""
    return int(get_torch_device().current_device()) if is_cuda_available else 0


def get_nccl_backend() -> str:
    """What carries collectives: NCCL on GPUs, gloo on CPUs."""
    return "nccl" if get_device_name() == "cuda" else "gloo"


def get_visible_devices_keyword() -> str:
    return "CUDA_VISIBLE_DEVICES"


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Give memory that nothing uses back to the device."""
    empty_cache()


# ---- Profiler


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int = 0
) -> None:
    """Log how much memory the device has in use; nothing on a CPU."""
    if not is_cuda_available or (torch.distributed.is_initialized() and torch.distributed.get_rank() != rank):
        return
    gib, device = 1 << 30, get_torch_device()
    used, held = device.memory_allocated() / gib, device.memory_reserved() / gib
    (logger or _LOG).log(level, "%s, memory allocated (GB): %.2f, memory reserved (GB): %.2f", head, used, held)


log_print = print


class GPUMemoryLogger:
    """Decorator: logs the device's memory before and after each call."""

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role, self.logger, self.level = role, logger, level

    def __call__(self, decorated_function: _Function) -> _Function:
        @wraps(decorated_function)
        def logged(*args: Any, **kwargs: Any) -> Any:
            log_gpu_memory_usage(f"Before {decorated_function.__name__}", self.logger, self.level)
            answer = decorated_function(*args, **kwargs)
            log_gpu_memory_usage(f"After {decorated_function.__name__}", self.logger, self.level)
            return answer

        return logged  # type: ignore[return-value]


class DistProfiler:
    """Profiles are `global_profiler.*` here; what is marked in user code is measured by the calls of the workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def start(self, **kwargs: Any) -> None: ...

    def stop(self) -> None: ...

    @staticmethod
    def annotate(*args: Any, **kwargs: Any) -> Callable[[_Function], _Function]:
        return lambda function: function


class DistProfilerExtension:
    """Base of workers that can be told to profile."""

    def __init__(self, profiler: Any = None) -> None:
        self.profiler = profiler

    def start_profile(self, **kwargs: Any) -> None: ...

    def stop_profile(self) -> None: ...


def mark_annotate(*args: Any, **kwargs: Any) -> Callable[[_Function], _Function]:
    return lambda function: function


def mark_start_range(message: str | None = None, *args: Any, **kwargs: Any) -> str | None:
    return message


def mark_end_range(range_id: Any) -> None: ...


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Adds the seconds that its body takes to `timing_raw[name]`."""
    begin = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - begin


simple_timer = _timer = marked_timer
