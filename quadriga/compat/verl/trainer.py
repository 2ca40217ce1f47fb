"""`verl.trainer.main_ppo`, `verl.trainer.ppo.ray_trainer` and the supervised entries: runs with verl's configuration.

Recipes subclass `TaskRunner` (which roles a run has and where they live) or `RayPPOTrainer` (see `driver`).
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from quadriga.compat.verl.batch_functions import apply_kl_penalty, compute_advantage, compute_response_mask
from quadriga.compat.verl.configs import as_checked
from quadriga.compat.verl.core_algos import AdvantageEstimator
from quadriga.compat.verl.datasets import create_rl_dataset, create_rl_sampler
from quadriga.compat.verl.devices import _timer, auto_set_device, marked_timer
from quadriga.compat.verl.driver import RayPPOTrainer
from quadriga.compat.verl.rewards import get_custom_reward_fn
from quadriga.compat.verl.single_controller import Worker
from quadriga.compat.verl.whole_config import completed
from quadriga.compat.verl.workers import ActorRolloutRefWorker, plain_class
from quadriga.config.needs import need_critic, need_reference_policy, need_reward_model
from quadriga.config.placement import Role
from quadriga.controller import ResourcePoolManager
from quadriga.trainer.main_ppo import TaskRunner as _TaskRunner
from quadriga.trainer.main_ppo import run_ppo as _run_ppo

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "TaskRunner",
    "WorkerType",
    "_timer",
    "apply_kl_penalty",
    "auto_set_device",
    "compute_advantage",
    "compute_response_mask",
    "create_rl_dataset",
    "create_rl_sampler",
    "get_custom_reward_fn",
    "main",
    "marked_timer",
    "need_critic",
    "need_reference_policy",
    "need_reward_model",
    "need_teacher_policy",
    "run_ppo",
    "run_sft",
]


WorkerType = type[Worker]


def run_ppo(config: Any, task_runner_class: Any = None) -> None:
    """A whole run. The runner gets verl's configuration, with every key that verl has."""
    given = completed(config)
    _run_ppo(as_checked(config), _given(plain_class(task_runner_class or TaskRunner), given))


def _given(runner_class: Any, config: DictConfig) -> Any:
    """A runner that is conducted with this configuration."""

    class Runner(runner_class):
        def run(self, _: Any) -> Any:
            return super().run(config)

    Runner.__name__ = Runner.__qualname__ = runner_class.__name__
    return Runner


def need_teacher_policy(config: Any) -> bool:
    """Whether teachers take part."""
    return bool(config.distillation.enabled)


def main(config: DictConfig) -> None:
    """For a composed configuration; as a program, `python -m quadriga.compat.verl -m verl.trainer.main_ppo`."""
    auto_set_device(config)
    run_ppo(config)


def run_sft(config: Any) -> None:
    """A supervised run with verl's configuration, old or new."""
    from quadriga.compat.translation import as_argument, flattened, translate
    from quadriga.trainer.supervised.entry import run_supervised

    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    keys = flattened({str(name): value for name, value in plain.items() if name != "hydra"})  # type: ignore[union-attr]
    translation = translate([f"{key}={as_argument(value)}" for key, value in keys.items()], "sft", defaults=False)
    translation.raise_if_refused()
    run_supervised(translation.nested(), "sft")


class TaskRunner(_TaskRunner):
    """Conducts a run. Its methods take verl's configuration and Quadriga's alike."""

    def add_actor_rollout_worker(self, config: Any) -> tuple[Any, Any]:
        _, group_class = super().add_actor_rollout_worker(as_checked(config))
        self.role_worker_mapping[Role.ActorRollout] = ActorRolloutRefWorker
        return ActorRolloutRefWorker, group_class

    def add_reward_model_resource_pool(self, config: Any) -> None:
        """The reward model, under the name that verl of August 2026 has for it."""
        self.add_reward_model_worker(config)

    def add_critic_worker(self, config: Any) -> None:
        super().add_critic_worker(as_checked(config))

    def add_reward_model_worker(self, config: Any) -> None:
        super().add_reward_model_worker(as_checked(config))

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: Any) -> None:
        super().add_ref_policy_worker(as_checked(config), ref_policy_cls)

    def init_resource_pool_mgr(self, config: Any) -> Any:
        return super().init_resource_pool_mgr(as_checked(config))

    def run(self, config: Any) -> bool:
        return super().run(as_checked(config))
