"""From a command line to a supervised run: in this process, in one of torchrun's, or in several that are started here."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

from quadriga.config.local_device import detect_local_device
from quadriga.config.supervised_load import load_supervised_config, screen_supervised_overrides
from quadriga.config.supervised_schema import SCHEMAS
from quadriga.errors import ConfigError, ResourceError

PROCESSES = "--nproc-per-node"


def run_supervised(config: Any, kind: str) -> dict[str, float]:
    """Run a whole job of `kind` (sft, rm or dpo) in this process, one of torchrun's or the only one.

    Returns the last step's metrics.
    """
    checked = load_supervised_config(config, SCHEMAS[kind])
    import torch.distributed as dist
    from transformers.utils import logging as transformers_logging

    from quadriga.tracking.sinks import check_sinks
    from quadriga.trainer.supervised.trainer import SupervisedTrainer

    check_sinks(checked.trainer.logger)
    transformers_logging.disable_progress_bar()
    device = _join_process_group(checked.trainer.device or detect_local_device(), checked.trainer.nccl_timeout)
    try:
        return SupervisedTrainer(checked, device).fit()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_arguments(kind: str, arguments: list[str]) -> int:
    """`quadriga sft|rm|dpo key=value …`; with `--nproc-per-node=N` in so many processes. Returns the exit code."""
    processes, rest = _take_processes(arguments)
    if processes > 1:
        return _launch(kind, processes, rest)
    import hydra

    @hydra.main(config_path="../config", config_name=f"{kind}_trainer", version_base=None)
    def main(config: Any) -> None:
        run_supervised(config, kind)

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach the caller instead of being printed by Hydra
    try:
        sys.argv = [sys.argv[0], *screen_supervised_overrides(rest, SCHEMAS[kind])]
        main()
    except ConfigError:
        if os.environ.get("RANK", "0") == "0":
            raise
        return 1  # every process has found the same; one of them says so
    return 0


def sft(arguments: list[str]) -> int:
    return run_arguments("sft", arguments)


def rm(arguments: list[str]) -> int:
    return run_arguments("rm", arguments)


def dpo(arguments: list[str]) -> int:
    return run_arguments("dpo", arguments)


def _take_processes(arguments: list[str]) -> tuple[int, list[str]]:
    rest, given = [], None
    queue = iter(arguments)
    for argument in queue:
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == PROCESSES:
            given = value if equals else next(queue, "")
        else:
            rest.append(argument)
    if given is None:
        return 1, rest
    if not given.isdigit() or int(given) < 1:
        raise ConfigError(f"{PROCESSES} {given!r} is no number of processes", f"write {PROCESSES}=2, for example")
    return int(given), rest


def _launch(kind: str, processes: int, arguments: list[str]) -> int:
    """The same command in `processes` processes of this machine, by torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    child = subprocess.Popen([*torchrun, "-m", "quadriga.trainer.supervised", kind, *arguments])
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.wait(timeout=60)  # it has had the same Ctrl-C from the terminal, and ends its processes
        raise


def _join_process_group(device_type: str, timeout_s: int) -> Any:
    """Join the processes that torchrun has started, if it has; returns the device of this one."""
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type) if device_type == "cpu" else torch.device(device_type, local_rank)
    if device.type != "cpu":
        accelerator = getattr(torch, device.type)
        if local_rank >= accelerator.device_count():
            raise ResourceError(
                f"process {local_rank} of this node has no {device.type} device; there are {accelerator.device_count()}",
                "start as many processes as there are devices (torchrun --nproc_per_node), or set trainer.device=cpu",
            )
        accelerator.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
        dist.init_process_group(backends[device.type], timeout=timedelta(seconds=timeout_s))
    return device
