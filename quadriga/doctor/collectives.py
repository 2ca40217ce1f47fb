"""Do processes on this machine reach each other? A real all_reduce over loopback, gloo always and NCCL with a GPU."""

from __future__ import annotations

from pathlib import Path

from quadriga.doctor.check import Finding, Options
from quadriga.doctor.probe import run_probe

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def check_gloo(options: Options) -> list[Finding]:
    """As a worker would do it; when that fails, once more with gloo bound to the loopback interface."""
    result = run_probe("all_reduce", "gloo", env=options.env, deadline_s=options.deadline_s)
    if result.failure is None:
        return [Finding("gloo", "ok", f"all_reduce of {result.facts['world_size']} processes on 127.0.0.1 is right")]
    what = f"all_reduce of 2 processes on 127.0.0.1: {result.failure}"
    if result.timed_out_after_s is None:
        cured = run_probe("all_reduce", "gloo", env={**options.env, **LOOPBACK}, deadline_s=options.deadline_s)
        if cured.failure is None:
            fix = (
                "export GLOO_SOCKET_IFNAME=lo on one machine (tried: works), or let the host name resolve in /etc/hosts"
            )
            return [Finding("gloo", "fail", what, fix)]
    fix = "allow TCP on 127.0.0.1 (firewall, sandbox) and unset GLOO_SOCKET_IFNAME; --deadline 60 if only slow"
    return [Finding("gloo", "fail", what, fix)]


def check_nccl(options: Options) -> list[Finding]:
    """Two ranks on two GPUs; with one GPU a world of one, which still loads and starts NCCL."""
    if not Path("/dev/nvidiactl").exists():
        return [Finding("nccl", "ok", "not needed: no NVIDIA GPU")]
    result = run_probe("all_reduce", "nccl", env=options.env, deadline_s=options.deadline_s)
    if result.failure:
        fix = "run again with NCCL_DEBUG=INFO; check /dev/shm and GPU peer access (NCCL_P2P_DISABLE=1 tells)"
        return [Finding("nccl", "fail", f"all_reduce: {result.failure}", fix)]
    world_size = result.facts["world_size"]
    if world_size == 0:
        return [Finding("nccl", "ok", "not needed: torch uses no GPU here")]
    return [Finding("nccl", "ok", f"NCCL {result.facts['nccl']}: all_reduce of {world_size} GPU(s) is right")]
