"""Environment variables that commonly hurt: each rule looks at the whole environment and reports or stays silent."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

from quadriga.doctor.check import Finding, Options
from quadriga.doctor.machine import usable_cores

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
