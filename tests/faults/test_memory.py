"""A long run does not grow."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from user_run import UserRun, merged


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_hundred_steps_grow_no_process_by_five_percent(task, tmp_path):
    """On Ray, with checkpoints every 20 steps; warm-up is the first 50 steps."""
    trainer = {
        "executor": "ray",
        "total_training_steps": 300,
        "save_freq": 20,
        "max_actor_ckpt_to_keep": 1,
        "default_local_dir": str(tmp_path / "run"),
    }
    ray_init = {"address": "local", "num_cpus": 2, "log_to_driver": False}
    changes = {"algorithm": {"adv_estimator": "grpo"}, "trainer": trainer, "ray_kwargs": {"ray_init": ray_init}}
    UserRun(merged(task, changes)).run()
    lines = [json.loads(line) for line in Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("memory/host_gb/driver", "memory/host_gb/gen", "memory/host_gb/update_actor"):
        values = [line[name] for line in lines]
        early, late = median(values[50:80]), median(values[-30:])
        print(f"{name}: {early:.4f} GiB after 50 steps, {late:.4f} GiB after 300 ({late / early - 1:+.2%})")
        assert late < 1.05 * early
