"""What this machine gives to this process: cores, memory, and the limits that a container or job scheduler puts on both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROL_GROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
UNLIMITED_BYTES = 2**60
"""Version 1 of control groups writes a number near 2**63 for "no limit"."""


@dataclass(frozen=True)
class Limits:
    """None means no limit."""

    cpus: float | None
    memory_bytes: int | None
    memory_left: int | None = None
    """Bytes that may still be taken; what the system caches of files counts as free."""


def read_limits(root: Path = CONTROL_GROUPS, membership: Path = MEMBERSHIP) -> Limits:
    """The tightest limit found in the control groups (versions 1 and 2) of this process and in all groups above them."""
    cpus: list[float] = []
    memory: list[int] = []
    left: list[int] = []
    for folder in _folders(root, membership):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        quota = quota or _text(folder / "cpu.cfs_quota_us")
        period = period or _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # "max" and "-1" both mean no quota
            cpus.append(int(quota) / int(period))
        for limit_file, usage_file, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _text(folder / limit_file)
            if limit.isdecimal() and int(limit) < UNLIMITED_BYTES:
                memory.append(int(limit))
                usage = _text(folder / usage_file)
                if usage.isdecimal():
                    left.append(max(0, int(limit) - int(usage) + _field(folder / "memory.stat", cached)))
    return Limits(min(cpus, default=None), min(memory, default=None), min(left, default=None))


def usable_cores() -> int:
    """Cores this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_of_machine() -> tuple[int, int]:
    """(total, available) bytes of the machine, whatever the control group says."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _field(MEMINFO, "MemAvailable:") << 10
    return total, available or total


def usable_memory() -> tuple[int, int]:
    """(total, available) bytes for this process: what its machine has, or less where its control group allows less."""
    (total, available), limits = memory_of_machine(), read_limits()
    if limits.memory_bytes is not None:
        total = min(total, limits.memory_bytes)
    left = total if limits.memory_left is None else limits.memory_left
    return total, min(available, left)


def _folders(root: Path, membership: Path) -> Iterator[Path]:
    """Every group folder from the process's own up to the mount points.

    Inside a container the listed path may be the host's and not exist here; the walk then still meets the mount point,
    which shows the container's own group.
    """
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in {root / name for name in (controllers, *controllers.split(","))}:
            folder = mount / path.lstrip("/")
            while folder != root.parent and folder.is_relative_to(mount):
                yield folder
                folder = folder.parent


def _field(path: Path, name: str) -> int:
    """The number after `name` in a file of lines `name number …`; 0 where there is none."""
    for line in _text(path).splitlines():
        words = line.split()
        if words and words[0] == name and len(words) > 1 and words[1].isdecimal():
            return int(words[1])
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


CALLERS_FOLDER = "QUADRIGA_CALLERS_FOLDER"
"""The variable that names it."""


def enter_callers_folder() -> None:
    """Go there, where this machine has it."""
    folder = os.environ.get(CALLERS_FOLDER)
    if folder and os.path.isdir(folder):
        os.chdir(folder)
