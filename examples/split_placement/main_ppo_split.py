"""PPO with actor and critic on separate devices, so that both are updated at the same time.

    python examples/split_placement/main_ppo_split.py --config-path=config --config-name=ppo_trainer_split

`trainer.placement=split` does it all: the slots are divided in half between `actor_rollout_ref_pool` and `critic_pool`, and
`RayPPOTrainer.fit` starts both updates before it waits for either. This script only shows the pieces by name.
"""

from __future__ import annotations

import sys
from typing import Any

import hydra
import ray

from quadriga.cli import run_command
from quadriga.config.load import load_config
from quadriga.controller.start_ray import start_ray
from quadriga.rewards import RewardManager
from quadriga.trainer.constants_ppo import get_ppo_ray_runtime_env
from quadriga.trainer.main_ppo import TaskRunner, auto_set_device
from quadriga.trainer.watching import conclude, watch_here

__all__ = ["RewardManager", "main", "main_task"]


@ray.remote(num_cpus=0)
def main_task(config: Any) -> None:
    """The whole run, inside the cluster."""
    watch_here(TaskRunner(), config, load_config(config))


@hydra.main(config_path="config", config_name="ppo_trainer_split", version_base=None)
def main(config: Any) -> None:
    auto_set_device(config)
    checked = load_config(config)
    if not ray.is_initialized():
        start_ray({"runtime_env": get_ppo_ray_runtime_env(), **checked.ray_kwargs.ray_init})
    ray.get(main_task.remote(config))
    conclude(checked)


if __name__ == "__main__":

    def run(arguments: list[str]) -> None:
        sys.argv[1:] = arguments
        main()

    sys.exit(run_command(run, sys.argv[1:]))
