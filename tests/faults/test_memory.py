"""A long run takes no more memory than a short one."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from user_run import UserRun


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_hundred_steps_grow_no_process_by_two_percent(tmp_path):
    """PPO of the embedded model on Ray, in tiny steps whose micro-batches have ever new sizes; warm-up is the first 50 steps."""
    trainer = {
        "total_training_steps": 300,
        "val_before_train": False,
        "test_freq": -1,
        "save_freq": 50,
        "max_actor_ckpt_to_keep": 1,
        "default_local_dir": str(tmp_path / "run"),
    }
    run = UserRun(
        {
            "data": {"train_batch_size": 2},
            "actor_rollout_ref": {"rollout": {"n": 2}},
            "trainer": trainer,
            "ray_kwargs": {"ray_init": {"address": "local", "num_cpus": 2, "log_to_driver": False}},
        }
    )
    run.start()
    assert run.finish(1000) == 0, run.console()[-4000:]
    lines = [json.loads(line) for line in Path(tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 300
    for name in ("memory/host_gb/driver", "memory/host_gb/gen", "memory/host_gb/update_actor"):
        values = [line[name] for line in lines if name in line]
        early, late = median(values[50:80]), median(values[-30:])
        print(f"{name}: {early:.4f} GiB after 50 steps, {late:.4f} GiB after 300 ({late / early - 1:+.2%})")
        assert late < 1.02 * early
