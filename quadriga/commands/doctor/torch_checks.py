"""The installed torch: what it was built for, the number formats and kernels of this CPU, and processes that reach each other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quadriga.commands.doctor.check import Finding, Options, Status
from quadriga.commands.doctor.probe import ProbeResult, run_command, run_probe

# ---- The installed torch: does it import, what was it built for, and does that fit the devices of this machine?


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


# ---- Which number formats this CPU can really multiply
# A machine may advertise instructions that it cannot run (AMX in a virtual machine, for example); the matrix product
# then kills the process with SIGILL. So the formats are tried in a subprocess, and for one that dies the doctor looks
# for an instruction-set limit with which it lives.


ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ISA_LIMITS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
DTYPES = ("float32", "bfloat16", "float16")

MatmulProbe = Callable[[str, dict[str, str]], ProbeResult]
"""(dtype, extra environment) -> how the product ended."""


def check_cpu_math(options: Options) -> list[Finding]:
    """All formats in one process, since importing torch is what takes time; alone only those that got no answer."""

    def probe(dtype: str, extra_env: dict[str, str]) -> ProbeResult:
        return run_probe("matmul", dtype, env={**options.env, **extra_env}, deadline_s=options.deadline_s)

    together = run_probe("matmul", *DTYPES, env=options.env, deadline_s=options.deadline_s)
    if together.timed_out_after_s is not None:
        fix = "run it again on an idle machine, or with more time: quadriga doctor --deadline 60"
        return [Finding("cpu math", "fail", f"matrix products on the CPU: {together.failure}", fix)]
    return [_right(dtype) if dtype in together.facts else judge_dtype(dtype, probe) for dtype in DTYPES]


def judge_dtype(dtype: str, probe: MatmulProbe) -> Finding:
    """Try `dtype`; when it kills the process, search a limit that cures it. Only float32 is needed on a CPU."""
    name = f"cpu {dtype}"
    result = probe(dtype, {})
    if result.failure is None:
        return _right(dtype)
    status: Status = "fail" if dtype == "float32" else "warn"
    what = f"matrix product on the CPU: {result.failure}"
    if result.killed_by:
        for limit in ISA_LIMITS:
            if probe(dtype, {ISA_VARIABLE: limit}).failure is None:
                return Finding(
                    name, status, what, f"export {ISA_VARIABLE}={limit} (tried: the product is right with it)"
                )
    if dtype == "float32":
        return Finding(name, "fail", what, "install a torch build for this CPU; run again with --deadline 60 if slow")
    return Finding(name, "warn", what, f"keep float32 on this CPU (the default), do not configure {dtype}")


def _right(dtype: str) -> Finding:
    return Finding(f"cpu {dtype}", "ok", "matrix product right")


# ---- Whether the kernels for CPUs compile here; without them everything works, more slowly


NAME = "cpu kernels"


def check_cpu_kernels(options: Options) -> list[Finding]:
    result = run_probe("cpu_kernels", env=options.env, deadline_s=options.deadline_s)
    failure = result.failure or result.facts.get("failure")
    if failure is None:
        return [Finding(NAME, "ok", "compiled for this machine")]
    fix = "install gcc or clang (for Debian: apt install gcc libc6-dev); a GPU needs none"
    return [Finding(NAME, "warn", f"{failure}; on a CPU, generation and training run at about 2/3 of their speed", fix)]


# ---- Do processes on this machine reach each other? A real all_reduce over loopback, gloo always and NCCL with a GPU


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
