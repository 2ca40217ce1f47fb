"""This machine: CPU cores, memory and the limits of its control group, disks, and environment variables that commonly hurt."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from quadriga.commands.doctor.check import Finding, Options, Status
from quadriga.host import Limits, memory_of_machine, read_limits, usable_cores

# ---- CPU cores, memory, open files and the memory allocator


GIB = 2**30
LITTLE_MEMORY = 4 * GIB
TOO_LITTLE_MEMORY = 1 * GIB
FEW_OPEN_FILES = 8192
TOO_FEW_OPEN_FILES = 512


def check_machine(options: Options) -> list[Finding]:
    limits = read_limits()
    total, available = memory_of_machine()
    return [
        judge_cpus(usable_cores(), limits, options.env, os.getloadavg()[0]),
        judge_memory(total, available, limits),
        judge_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        judge_allocator(options.env, find_tcmalloc()),
    ]


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


# ---- Room for data: shared memory for Ray's objects, disk for runs, checkpoints and temporary files


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
        memory = min(memory_of_machine()[0], limit or sys.maxsize)
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


# ---- Environment variables that commonly hurt: each rule looks at the whole environment and reports or stays silent


NAME = "environment"
Env = Mapping[str, str]

SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every GPU kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs exchange data through host memory",
    "NCCL_SHM_DISABLE": "GPUs of one machine exchange data over sockets",
    "NCCL_IB_DISABLE": "machines exchange data over Ethernet, not InfiniBand",
}
"""Debugging switches that cost speed when they stay on."""

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set for each worker by Quadriga itself."""


def check_environment(options: Options) -> list[Finding]:
    interfaces = {name for _, name in socket.if_nameindex()}
    return judge_environment(options.env, usable_cores(), interfaces)


def judge_environment(env: Env, cores: int, interfaces: set[str]) -> list[Finding]:
    findings = [*_devices(env), *_threads(env, cores), *_network(env, interfaces), *_switches(env), *_offline(env)]
    return findings or [Finding(NAME, "ok", "no variable that is known to hurt")]


def _is_on(value: str | None) -> bool:
    return (value or "").strip().lower() not in ("", "0", "false", "no", "off")


def _devices(env: Env) -> Iterator[Finding]:
    noset = sorted(name for name in env if name.startswith("RAY_EXPERIMENTAL_NOSET_") and _is_on(env[name]))
    if noset:
        what = f"{', '.join(noset)} is set: Ray no longer gives each worker a device of its own"
        yield Finding(NAME, "warn", what, f"unset {' '.join(noset)}, unless you place devices yourself")
    rival = next((name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in env), None)
    if "ROCR_VISIBLE_DEVICES" in env and rival:
        what = f"ROCR_VISIBLE_DEVICES and {rival} are both set: the second counts among what the first leaves"
        yield Finding(NAME, "warn", what, f"keep {rival} alone: unset ROCR_VISIBLE_DEVICES")


def _threads(env: Env, cores: int) -> Iterator[Finding]:
    threads = env.get("OMP_NUM_THREADS")
    if threads is None:
        return
    if not threads.isdecimal() or int(threads) == 0:
        yield Finding(NAME, "warn", f"OMP_NUM_THREADS={threads!r} is not a number of threads", "unset OMP_NUM_THREADS")
    elif int(threads) > cores:
        what = f"OMP_NUM_THREADS={threads}, but there are {cores} cores: threads fight for them"
        yield Finding(NAME, "warn", what, f"unset OMP_NUM_THREADS, or export OMP_NUM_THREADS={cores}")
    elif int(threads) == 1 and cores > 1:
        what = f"OMP_NUM_THREADS=1: one thread a process on a machine of {cores} cores"
        yield Finding(NAME, "ok", what, "unset OMP_NUM_THREADS if a single process should use them all")


def _network(env: Env, interfaces: set[str]) -> Iterator[Finding]:
    """A missing interface is a classic cause of collectives that wait for ever."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = env.get(name, "")
        if not value or value.startswith("^"):  # NCCL: everything but these
            continue
        wanted = [part.lstrip("=") for part in value.split(",")]
        # NCCL takes a name as a prefix unless it starts with "=".
        if not any(interface.startswith(part) for part in wanted for interface in interfaces):
            what = f"{name}={value}, but the interfaces here are {', '.join(sorted(interfaces))}"
            yield Finding(NAME, "warn", what, f"unset {name}, or name one of them")


def _switches(env: Env) -> Iterator[Finding]:
    for name, effect in SLOW.items():
        if _is_on(env.get(name)):
            yield Finding(NAME, "warn", f"{name}={env[name]}: {effect}", f"unset {name} when you are done debugging")
    if _is_on(env.get("RAY_IGNORE_VERSION_MISMATCH")):
        what = "RAY_IGNORE_VERSION_MISMATCH is set: different Ray or Python versions fail later and obscurely"
        yield Finding(NAME, "warn", what, "unset RAY_IGNORE_VERSION_MISMATCH and use equal versions")
    leftover = [name for name in LAUNCHER if name in env]
    if leftover:
        what = f"{', '.join(leftover)} left over from a launcher; Quadriga sets them for each worker"
        yield Finding(NAME, "warn", what, f"unset {' '.join(leftover)}")


def _offline(env: Env) -> Iterator[Finding]:
    names = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE") if _is_on(env.get(name))
    ]
    if names:
        what = f"{', '.join(names)} is set: models and data must be local paths or already in the cache"
        yield Finding(NAME, "ok", what, f"unset {' '.join(names)} to download")
