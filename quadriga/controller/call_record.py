"""What a worker's process did, when, and with how much memory."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from quadriga.accelerator import in_use

GIB = 1 << 30


class CallRecord(NamedTuple):
    """One call: start in seconds since 1970, its length, and the most memory that the process held meanwhile."""

    role: str
    method: str
    start: float
    seconds: float
    host_gb: float
    device_gb: float


class CallMeter:
    """Measures one call. Two calls in two threads of a process share its memory: each sees the larger peak of the two."""

    def __init__(self, role: str, method: str) -> None:
        self.role, self.method = role, method
        _forget_peaks()
        self.start, self.clock = time.time(), time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.clock

    def record(self) -> CallRecord:
        device = in_use()
        peak = device.max_memory_allocated() / GIB if device is not None else 0.0
        return CallRecord(self.role, self.method, self.start, self.seconds, host_gb(peak=True), peak)


def around_call(worker: Any, method: str) -> AbstractContextManager[None]:
    """What a worker wants around one of its calls (`worker.around_call(method)`, say a profile); nothing for most."""
    wanted = getattr(worker, "around_call", None)
    return nullcontext() if wanted is None else wanted(method)


def host_gb(peak: bool = False) -> float:
    """Resident memory of this process now, or the most since that was last forgotten. 0 where it is not known."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next((int(line.split()[1]) / (1 << 20) for line in status if line.startswith(wanted)), 0.0)
    except OSError:  # no Linux
        return 0.0


def _forget_peaks() -> None:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
            reset.write("5")
    except OSError:
        pass  # a kernel that does not offer it: the peak is that of the whole life
    device = in_use()
    if device is not None:
        device.reset_peak_memory_stats()
