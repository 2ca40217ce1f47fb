"""Which device a run uses."""

from __future__ import annotations

import os
from typing import Any

from quadriga.config.local_device import detect_local_device


def auto_set_device(config: Any) -> None:
    """Fill in `config.trainer.device` where the user left it open; an explicit value is obeyed.

    On an existing cluster the driver's own machine says little about the workers', so the choice is left to `run_ppo`,
    which asks the cluster.
    """
    trainer = getattr(config, "trainer", None)
    if trainer is None or getattr(trainer, "device", None) is not None:
        return
    ray_init = getattr(getattr(config, "ray_kwargs", None), "ray_init", None) or {}
    if ray_init.get("address") or os.environ.get("RAY_ADDRESS"):
        return
    trainer.device = detect_local_device()
