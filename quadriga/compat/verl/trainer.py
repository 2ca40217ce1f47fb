"""`verl.trainer.main_ppo`, `verl.trainer.ppo.ray_trainer` and the supervised entries: runs with verl's configuration.

Recipes subclass `TaskRunner` (which roles a run has and where they live) or `RayPPOTrainer` (what a step does, in
Quadriga's methods: `fit`, `next_scored_batch`, `add_advantages`, `update`, `validate`, …).
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from quadriga.checkpoint.store import CheckpointStore
from quadriga.compat.verl.batch_functions import apply_kl_penalty, compute_advantage, compute_response_mask
from quadriga.compat.verl.configs import understood
from quadriga.config import Config, as_plain_dict, load_config
from quadriga.config.needs import need_critic, need_reference_policy, need_reward_model
from quadriga.controller import ResourcePoolManager
from quadriga.data import create_rl_dataset, create_rl_sampler
from quadriga.tracking.run_directory import RunDirectory
from quadriga.trainer.device import auto_set_device
from quadriga.trainer.main_ppo import TaskRunner as _TaskRunner
from quadriga.trainer.main_ppo import run_ppo as _run_ppo
from quadriga.trainer.ppo.journal import Journal
from quadriga.trainer.ppo.ray_trainer import RayPPOTrainer as _RayPPOTrainer
from quadriga.trainer.ppo.role import Role

__all__ = [
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "TaskRunner",
    "apply_kl_penalty",
    "auto_set_device",
    "compute_advantage",
    "compute_response_mask",
    "create_rl_dataset",
    "create_rl_sampler",
    "main",
    "need_critic",
    "need_reference_policy",
    "need_reward_model",
    "run_ppo",
    "run_sft",
]


def as_checked(config: Any) -> Config:
    """A configuration with verl's keys, or one of Quadriga's, typed and checked."""
    return config if isinstance(config, Config) else load_config(understood(config))


def run_ppo(config: Any, task_runner_class: Any = None) -> None:
    """A whole run. The runner gets the complete configuration, in Quadriga's keys, as an OmegaConf object."""
    _run_ppo(OmegaConf.create(as_plain_dict(as_checked(config))), task_runner_class)


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
        return super().add_actor_rollout_worker(as_checked(config))

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


class RayPPOTrainer(_RayPPOTrainer):
    """The driver of a run, with verl's constructor; run directory, metrics and checkpoints are made here."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Any,
        resource_pool_manager: Any,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
        **own: Any,
    ) -> None:
        checked = as_checked(config)
        data = checked.data
        if ray_worker_group_cls is None:
            from quadriga.controller import RayWorkerGroup as ray_worker_group_cls
        if train_dataset is None:
            train_dataset = create_rl_dataset(data.train_files, data, tokenizer, None, True, data.train_max_samples)
        if val_dataset is None:
            val_dataset = create_rl_dataset(data.val_files, data, tokenizer, None, False, data.val_max_samples)
        self.directory: RunDirectory | None = None
        if "tracking" not in own:
            self.directory = RunDirectory(checked.trainer.default_local_dir)
            self.directory.lock()
            store = CheckpointStore(self.directory.checkpoints, checked.trainer.max_actor_ckpt_to_keep)
            self.found = store.find(checked.trainer.resume_mode, checked.trainer.resume_from_path)
            resumed = self.found.step if self.found else None
            own |= {"tracking": Journal(checked, self.directory, None, resumed), "checkpoints": store}
        super().__init__(
            checked,
            tokenizer,
            role_worker_mapping,
            resource_pool_manager,
            ray_worker_group_cls,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            **own,
        )
        if train_sampler is not None:
            self.loader.sampler = train_sampler

    def init_workers(self) -> Any:
        """Start the workers; where there is a checkpoint, the run goes on after it."""
        reports = super().init_workers()
        if self.directory is not None and self.found:
            self.resume(self.found)
        return reports

    def fit(self) -> None:
        """Train to the end, and leave no worker behind where the trainer was built alone."""
        if self.directory is None:
            super().fit()
            return
        try:
            super().fit()
        finally:
            self.shutdown()
            self.directory.unlock()
