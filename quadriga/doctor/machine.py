"""CPU cores, memory, open files and the memory allocator."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from quadriga.doctor.cgroup import Limits, read_limits
from quadriga.doctor.check import Finding, Options, Status

GIB = 2**30
LITTLE_MEMORY = 4 * GIB
TOO_LITTLE_MEMORY = 1 * GIB
FEW_OPEN_FILES = 8192
TOO_FEW_OPEN_FILES = 512


def check_machine(options: Options) -> list[Finding]:
    limits = read_limits()
    total, available = memory_bytes()
    return [
        judge_cpus(usable_cores(), limits, options.env, os.getloadavg()[0]),
        judge_memory(total, available, limits),
        judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        judge_allocator(options.env, find_tcmalloc()),
    ]


def usable_cores() -> int:
    """Cores this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """(total, available) of the machine, whatever the control group says."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return total, int(line.split()[1]) * 1024
    return total, total


def judge_cpus(cores: int, limits: Limits, env: Mapping[str, str], load: float = 0.0) -> Finding:
    """A quota below the core count is not seen by thread pools, which then fight for the CPU."""
    if limits.cpus is not None and limits.cpus < cores:
        threads = max(1, int(limits.cpus))
        what = f"{cores} cores, but the control group allows the time of {limits.cpus:g}"
        if env.get("OMP_NUM_THREADS", "").isdecimal() and int(env["OMP_NUM_THREADS"]) <= threads:
            return Finding("cpu", "ok", f"{what}; OMP_NUM_THREADS={env['OMP_NUM_THREADS']} respects it")
        return Finding("cpu", "warn", what, f"export OMP_NUM_THREADS={threads}, or give the container more CPU")
    if cores < 2:
        return Finding(
            "cpu", "warn", "1 core: driver, workers and scoring take turns", "give the machine 2 cores or more"
        )
    if load > 2 * cores:
        what = f"{cores} cores, but {load:.0f} programs want to run: training will be slow, and so is this doctor"
        return Finding(
            "cpu", "warn", what, "end the others or wait; if probes give no answer: quadriga doctor --deadline 60"
        )
    return Finding("cpu", "ok", f"{cores} cores")


def judge_memory(total: int, available: int, limits: Limits) -> Finding:
    what = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if limits.memory_bytes is not None and limits.memory_bytes < total:
        available = min(available, limits.memory_bytes)
        what += f"; the control group allows {limits.memory_bytes / GIB:.1f} GiB"
    fix = "end other programs, or give the machine or container more memory"
    if available < TOO_LITTLE_MEMORY:
        return Finding("memory", "fail", what, fix)
    return Finding("memory", "warn", what, fix) if available < LITTLE_MEMORY else Finding("memory", "ok", what)


def judge_open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= FEW_OPEN_FILES:
        return Finding("open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit}")
    status: Status = "fail" if limit < TOO_FEW_OPEN_FILES else "warn"
    return Finding("open files", status, f"limit {limit}: Ray opens thousands of sockets and files", "ulimit -n 65536")


def find_tcmalloc() -> Path | None:
    folders = (Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib"), *Path("/usr/lib").glob("*-linux-gnu"))
    return next((path for folder in folders for path in sorted(folder.glob("libtcmalloc*.so*"))), None)


def judge_allocator(env: Mapping[str, str], installed: Path | None) -> Finding:
    """A hint only: a faster allocator helps CPU training, nothing needs it."""
    preloaded = [name for name in ("tcmalloc", "jemalloc") if name in env.get("LD_PRELOAD", "")]
    if preloaded:
        return Finding("allocator", "ok", f"{preloaded[0]} is preloaded")
    fix = (
        f"export LD_PRELOAD={installed}"
        if installed
        else "install libtcmalloc (Debian: libtcmalloc-minimal4) and preload it"
    )
    return Finding("allocator", "ok", "the system's malloc; tcmalloc is often faster for CPU training", fix)
