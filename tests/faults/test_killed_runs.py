"""A run that is killed and started again with the same command equals one that was never disturbed, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from user_run import UserRun, assert_same_run, merged

STEPS = 8  # an epoch has 4: its border lies in the middle
KILLS = 2

ALGORITHMS = {
    "grpo": {"algorithm": {"adv_estimator": "grpo"}},
    "ppo": {
        "algorithm": {
            "adv_estimator": "gae",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.01, "horizon": 64},
        },
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4}},
        "critic": {"optim": {"lr": 1e-2}},
    },
}


def configuration(task: dict, folder: Path, algorithm: str, world: int) -> dict:
    trainer = {
        "executor": "ray",
        "n_gpus_per_node": world,
        "total_training_steps": STEPS,
        "save_freq": 1,
        "test_freq": 3,
        "max_actor_ckpt_to_keep": 2,
        "default_local_dir": str(folder),
    }
    ray_init = {"address": "local", "num_cpus": 2, "log_to_driver": False}
    return merged(task, ALGORITHMS[algorithm], {"trainer": trainer, "ray_kwargs": {"ray_init": ray_init}})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_killed_at_random_and_started_again(task, tmp_path, chance, algorithm, world):
    whole = UserRun(configuration(task, tmp_path / "whole", algorithm, world))
    whole.run()
    killed = UserRun(configuration(task, tmp_path / "killed", algorithm, world))
    for number in range(KILLS):
        killed.start()
        print(killed.kill_during(chance, STEPS, whole_tree=number == 0))
    killed.run()
    assert_same_run(whole.folder, killed.folder)
