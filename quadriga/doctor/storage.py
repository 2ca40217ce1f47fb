"""Room for data: shared memory for Ray's objects, disk for runs, checkpoints and temporary files."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from quadriga.doctor.cgroup import read_limits
from quadriga.doctor.check import Finding, Options
from quadriga.doctor.machine import GIB, memory_bytes

SHARED_MEMORY = Path("/dev/shm")
LITTLE_DISK = 10 * GIB
TOO_LITTLE_DISK = 1 * GIB
RAY_FULL_FRACTION = 0.95
"""Ray stops creating objects when the disk of its temporary folder is fuller than this."""


def check_storage(options: Options) -> list[Finding]:
    temporary = Path(options.env.get("RAY_TMPDIR") or options.env.get("TMPDIR") or tempfile.gettempdir())
    findings = [
        judge_disk("output dir", options.output_dir, "pass --output-dir on a larger disk, or delete old runs"),
        judge_disk("temp dir", temporary, "free space, or export RAY_TMPDIR to a larger disk", ray_writes_here=True),
    ]
    if sys.platform == "linux":
        limit = read_limits().memory_bytes
        memory = min(memory_bytes()[0], limit or sys.maxsize)
        findings.insert(0, judge_shared_memory(free_bytes(SHARED_MEMORY), memory))
    return findings


def free_bytes(folder: Path) -> int:
    """0 for a folder that does not exist."""
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


def judge_shared_memory(free: int, memory: int, roomy: int = 10 * 10**9) -> Finding:
    """Whether Ray keeps its object store in memory.

    Ray wants 30 % of the memory. It makes do with a smaller /dev/shm only if that still has `roomy` bytes; otherwise it
    puts the store on disk, which is slow.
    """
    wanted = min(int(0.3 * memory), 200 * 10**9)
    what = f"{SHARED_MEMORY} has {free / GIB:.1f} GiB free"
    if free >= wanted:
        return Finding("shared memory", "ok", what)
    if 0.95 * free >= roomy:
        return Finding("shared memory", "ok", f"{what}, which bounds Ray's object store (30 % of memory otherwise)")
    size = f"{wanted // GIB + 1}g"
    fix = f"enlarge it: docker run --shm-size={size}, or mount -o remount,size={size} {SHARED_MEMORY}"
    return Finding("shared memory", "warn", f"{what}: Ray will keep its object store on disk, slowly", fix)


def judge_disk(
    name: str,
    folder: Path,
    fix: str,
    *,
    little: int = LITTLE_DISK,
    too_little: int = TOO_LITTLE_DISK,
    ray_writes_here: bool = False,
) -> Finding:
    """Write a file to `folder`, or to its nearest parent that exists, and look at the space there."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding(name, "fail", f"cannot write to {existing}: {error.strerror or error}", fix)
    usage = shutil.disk_usage(existing)
    what = f"{folder.absolute()}: {usage.free / GIB:.0f} of {usage.total / GIB:.0f} GiB free"
    if usage.free < too_little:
        return Finding(name, "fail", what, fix)
    if ray_writes_here and usage.free < (1 - RAY_FULL_FRACTION) * usage.total:
        return Finding(name, "warn", f"{what}: Ray refuses new objects on a disk over 95 % full", fix)
    return Finding(name, "warn" if usage.free < little else "ok", what, fix if usage.free < little else "")
