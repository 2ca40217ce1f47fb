"""Entry point of supervised fine-tuning: `torchrun --nproc_per_node=N -m quadriga.trainer.fsdp_sft_trainer key=value …`.

Without torchrun (`python -m …`, `quadriga sft`) it is one process.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import hydra

from quadriga.config.sft_load import load_sft_config, screen_sft_overrides
from quadriga.errors import ConfigError, ResourceError
from quadriga.trainer.device import detect_local_device


@hydra.main(config_path="config", config_name="sft_trainer", version_base=None)
def main(config: Any) -> None:
    run_sft(config)


def run_sft(config: Any) -> dict[str, float]:
    """Run a whole supervised job in this process, one of torchrun's or the only one; returns the last step's metrics."""
    checked = load_sft_config(config)
    import torch.distributed as dist

    from quadriga.trainer.sft.trainer import FSDPSFTTrainer

    device = join_process_group(checked.trainer.device or detect_local_device(), checked.trainer.nccl_timeout)
    try:
        return FSDPSFTTrainer(checked, device=device).fit()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_process_group(device_type: str, timeout_s: int) -> Any:
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


def command(arguments: list[str]) -> int:
    """`main` for a command line: exit code 0, or 1 after printing what went wrong (with the stack under `--debug`)."""
    from quadriga.cli import run_command

    return run_command(_run_hydra, arguments)


def _run_hydra(arguments: list[str]) -> int:
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach run_command instead of being printed by Hydra
    try:
        sys.argv = [sys.argv[0], *screen_sft_overrides(arguments)]
        main()
    except ConfigError:
        if os.environ.get("RANK", "0") == "0":
            raise
        return 1  # every process has found the same; one of them says so
    return 0


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
