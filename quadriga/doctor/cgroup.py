"""The CPU and memory limits a container or job scheduler puts on this process (control groups, versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED_BYTES = 2**60
"""Version 1 writes a number near 2**63 for "no limit"."""


@dataclass(frozen=True)
class Limits:
    """None means no limit."""

    cpus: float | None
    memory_bytes: int | None


def read_limits(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Limits:
    """The tightest limit found in the groups of this process and in all groups above them."""
    cpus: list[float] = []
    memory: list[int] = []
    for folder in _folders(root, membership):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        quota = quota or _text(folder / "cpu.cfs_quota_us")
        period = period or _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # "max" and "-1" both mean no quota
            cpus.append(int(quota) / int(period))
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _text(folder / name)
            if limit.isdecimal() and int(limit) < UNLIMITED_BYTES:
                memory.append(int(limit))
    return Limits(min(cpus, default=None), min(memory, default=None))


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


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
