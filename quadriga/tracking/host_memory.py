"""Resident memory of a process, for `perf/max_memory_gb`."""

from __future__ import annotations

import resource
import sys


def peak_memory_gb() -> float:
    """The largest resident memory this process has had, in 10⁹ bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
