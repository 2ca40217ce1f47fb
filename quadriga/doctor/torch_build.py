"""The installed torch: does it import, what was it built for, and does that fit the devices of this machine?"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quadriga.doctor.check import Finding, Options
from quadriga.doctor.probe import run_command, run_probe

GIB = 2**30
CUDA_BUILD = "install the torch build for your driver: see https://pytorch.org/get-started/locally"


def check_torch(options: Options) -> list[Finding]:
    result = run_probe("torch_info", env=options.env, deadline_s=options.deadline_s)
    if "version" not in result.facts:
        fix = "reinstall torch; if it was only slow (first import, network disk), run again with --deadline 60"
        return [Finding("torch", "fail", f"import torch: {result.failure}", fix)]
    driver = nvidia_driver(options)
    ascend = any(Path("/dev").glob("davinci[0-9]*"))
    return [
        describe_build(result.facts),
        *judge_devices(result.facts, driver, ascend, options.env, interrupted=result.failure),
    ]


def nvidia_driver(options: Options) -> list[str] | None:
    """One "name, driver version" line per GPU the driver shows; None without a driver."""
    if not shutil.which("nvidia-smi", path=options.env.get("PATH")):
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    result = run_command(query, env=options.env, deadline_s=options.deadline_s)
    return None if result.failure else [line.strip() for line in result.stdout.splitlines() if line.strip()]


def describe_build(torch: Mapping[str, Any]) -> Finding:
    return Finding("torch", "ok", f"{torch['version']} ({_built_for(torch)}), {torch['threads']} threads")


def judge_devices(
    torch: Mapping[str, Any],
    driver: list[str] | None,
    ascend: bool,
    env: Mapping[str, str],
    interrupted: str | None = None,
) -> list[Finding]:
    """Compare what torch can use with what the drivers show.

    Args:
        torch: facts of the probe `torch_info`.
        driver: lines of `nvidia_driver`.
        ascend: whether NPU device files exist.
        env: the environment torch saw.
        interrupted: why the probe ended early, if it did: then a device hangs or kills the process.
    """
    if interrupted:
        what = f"torch imports, but using the devices failed: {interrupted}"
        return [
            Finding("devices", "fail", what, "look at nvidia-smi and dmesg for a faulty GPU, then reset it or reboot")
        ]
    if torch["devices"]:
        return [_judge_device(device) for device in torch["devices"]]
    if driver:
        return [_judge_unused_gpus(torch, driver, env)]
    if ascend:
        what = "Ascend NPUs are here, but torch cannot use them"
        return [
            Finding(
                "devices", "warn", what, f"install torch_npu for torch {torch['version']} and source CANN's set_env.sh"
            )
        ]
    return [Finding("devices", "ok", "no accelerator: training runs on the CPU (trainer.device=cpu)")]


def _judge_device(device: Mapping[str, Any]) -> Finding:
    name = f"{device['device']}: {device['name']}"
    if device["error"]:
        return Finding("devices", "fail", f"{name}: a small matrix product fails: {device['error']}", CUDA_BUILD)
    free, total = device["free_bytes"] / GIB, device["total_bytes"] / GIB
    what = f"{name}, {free:.0f} of {total:.0f} GiB free"
    if free < total / 2:
        return Finding("devices", "warn", what, "another process holds the memory: find it with nvidia-smi and end it")
    return Finding("devices", "ok", what)


def _judge_unused_gpus(torch: Mapping[str, Any], driver: list[str], env: Mapping[str, str]) -> Finding:
    gpus = f"the driver shows {len(driver)} GPU(s) ({driver[0]})"
    if not torch["built_for"]:
        return Finding("devices", "warn", f"{gpus}, but this torch is built for the CPU only", CUDA_BUILD)
    hidden = env.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        what = f"{gpus}, but CUDA_VISIBLE_DEVICES={hidden!r} hides them all"
        return Finding("devices", "warn", what, "unset CUDA_VISIBLE_DEVICES, unless you want the CPU")
    what = f"{gpus}, but torch ({_built_for(torch)}) cannot use them: {torch['accelerator_error'] or 'no reason given'}"
    return Finding("devices", "fail", what, f"update the driver, or {CUDA_BUILD}")


def _built_for(torch: Mapping[str, Any]) -> str:
    return f"built for {torch['built_for']}" if torch["built_for"] else "CPU build"
