"""Recipes written for verl: trainers with a `fit` of their own or parts of a step of their own, and mains that place workers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import quadriga.compat.verl

os.environ.pop(quadriga.compat.verl.VARIABLE, None)  # other tests start processes too
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))
from tiny_policy import REWARD, write_model, write_prompts

RECIPES = Path(__file__).parent / "recipes"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_prompts(folder / "prompts.jsonl")
    (folder / "mine.py").write_text(REWARD)
    return folder


def arguments(task: Path, run: Path, *more: str) -> list[str]:
    """verl's command line of a short run on a tiny task."""
    return [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        f"actor_rollout_ref.model.path={task}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"data.train_files={task}/prompts.jsonl",
        f"data.val_files={task}/prompts.jsonl",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        f"custom_reward_function.path={task}/mine.py",
        "custom_reward_function.name=share_of_vowels",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=3",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={run}",
        *more,
    ]


def composed(arguments: list[str]) -> Any:
    """What Hydra would make of `ppo_trainer` and a command line."""
    from verl.trainer import config as package

    whole = OmegaConf.load(
        Path(package.__spec__.loader.get_resource_reader(package.__name__).files()) / "ppo_trainer.yaml"
    )
    return OmegaConf.merge(whole, OmegaConf.from_dotlist([a.lstrip("+") for a in arguments]))


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > 0]


def train(trainer_class: Any, config: Any) -> Any:
    """What the `run` of a recipe's runner does, in this process."""
    from verl.trainer.main_ppo import TaskRunner
    from verl.utils import hf_tokenizer

    runner = TaskRunner()
    worker_class, group_class = runner.add_actor_rollout_worker(config)
    runner.add_critic_worker(config)
    runner.add_ref_policy_worker(config, worker_class)
    trainer = trainer_class(
        config=config,
        tokenizer=hf_tokenizer(config.actor_rollout_ref.model.path),
        role_worker_mapping=runner.role_worker_mapping,
        resource_pool_manager=runner.init_resource_pool_mgr(config),
        ray_worker_group_cls=group_class,
    )
    trainer.init_workers()
    trainer.fit()
    return trainer


def recipe(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


LOCAL = "+trainer.executor=local"


def test_a_recipe_with_verls_fit_and_dynamic_sampling_trains(task: Path, tmp_path: Path) -> None:
    more = [
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        LOCAL,
    ]
    module = recipe("dynamic_sampling")
    train(module.DynamicSamplingTrainer, composed(arguments(task, tmp_path / "run", *more)))
    steps = steps_of(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(step["train/num_gen_batches"] >= 1 for step in steps)
    assert steps[-1]["critic/score/mean"] > steps[0]["critic/score/mean"]
    assert {"actor/kl_loss", "actor/entropy", "timing_s/gen", "rollout_corr/kl"} <= set(steps[0])
    assert [any(key.startswith("val/") for key in step) for step in steps] == [False, True, True]
    assert sorted(f.name for f in (tmp_path / "run" / "checkpoints").glob("global_step_*")) == [
        "global_step_2",
        "global_step_3",
    ]


@pytest.mark.slow
def test_the_same_recipe_goes_on_after_its_last_checkpoint(task: Path, tmp_path: Path) -> None:
    more = ["algorithm.filter_groups.metric=score", "trainer.save_freq=1", "trainer.val_before_train=False", LOCAL]
    trainer_class = recipe("dynamic_sampling").DynamicSamplingTrainer
    first = [*arguments(task, tmp_path / "run", *more), "trainer.total_training_steps=2"]
    train(trainer_class, composed(first))
    train(trainer_class, composed(arguments(task, tmp_path / "run", *more)))
    whole = arguments(task, tmp_path / "whole", *more)
    train(trainer_class, composed(whole))
    again, undisturbed = steps_of(tmp_path / "run"), steps_of(tmp_path / "whole")
    assert [step["step"] for step in again] == [1, 2, 3]
    assert again[0]["critic/score/mean"] == undisturbed[0]["critic/score/mean"]


def test_parts_of_a_step_are_called_where_a_recipe_has_its_own(task: Path, tmp_path: Path) -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    called = []

    class Mine(RayPPOTrainer):
        def _get_gen_batch(self, batch: Any) -> Any:
            called.append("prompts")
            return super()._get_gen_batch(batch)

        def _compute_old_log_prob(self, batch: Any) -> Any:
            called.append("old")
            return super()._compute_old_log_prob(batch)

        def _compute_or_extract_reward(self, batch: Any, **kwargs: Any) -> Any:
            rewards, extra = super()._compute_or_extract_reward(batch, **kwargs)
            return rewards + (rewards != 0) * 10, extra

        def _update_actor(self, batch: Any) -> Any:
            called.append("update")
            assert {"advantages", "old_log_probs", "ref_log_prob", "values", "entropys"} - set(batch.batch.keys()) == {
                "entropys"
            }
            return super()._update_actor(batch)

        def _validate(self) -> dict[str, float]:
            return {**super()._validate(), "val/mine": 1.0}

    more = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True", "trainer.test_freq=2", LOCAL]
    critic = [f"critic.model.path={task}/model", "critic.ppo_micro_batch_size_per_gpu=4", "trainer.critic_warmup=2"]
    train(Mine, composed(arguments(task, tmp_path / "run", *more, *critic)))
    steps = steps_of(tmp_path / "run")
    assert called == ["prompts", "old", *["prompts", "old", "update"] * 2], "the actor learns from step 2 on"
    assert steps[0]["critic/score/mean"] > 1, "what the override adds to the reward"
    assert "critic/vf_loss" in steps[0]
    assert ["val/mine" in step for step in steps] == [False, True, True]


def test_overrides_in_quadrigas_words_are_called_by_its_own_loop(task: Path, tmp_path: Path) -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    class Mine(RayPPOTrainer):
        def add_advantages(self, batch: Any) -> None:
            super().add_advantages(batch)
            self.metrics["mine/rows"] = float(len(batch))

        def _validate(self) -> dict[str, float]:
            return {"val/mine": float(self.global_steps)}

        def _save_checkpoint(self) -> None:
            super()._save_checkpoint()
            (self.directory.path / "saved").write_text(str(self.global_steps))

    more = ["trainer.test_freq=2", "trainer.save_freq=2", "trainer.val_before_train=False", LOCAL]
    train(Mine, composed(arguments(task, tmp_path / "run", *more)))
    steps = steps_of(tmp_path / "run")
    assert [step["mine/rows"] for step in steps] == [32.0] * 3
    assert [step.get("val/mine") for step in steps] == [None, 2.0, 3.0]
    assert (tmp_path / "run" / "saved").read_text() == "3"
    assert (tmp_path / "run" / "checkpoints" / "global_step_3").is_dir()


def test_overrides_that_nothing_would_call_and_names_without_counterpart_say_so() -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    with pytest.raises(TypeError, match="_maybe_log_val_generations, which nothing in Quadriga's alias of verl calls"):

        class Dead(RayPPOTrainer):
            def _maybe_log_val_generations(self) -> None: ...

    with pytest.raises(AttributeError, match="has no counterpart in Quadriga's alias of verl"):
        _ = RayPPOTrainer.__new__(RayPPOTrainer).reward_loop_manager


def test_a_main_that_places_workers_itself_and_asks_their_groups_trains(task: Path, tmp_path: Path) -> None:
    """As mains of 2025 do: roles of `fsdp_workers`, pools by hand, a reward manager that is called with the batch."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role, compute_advantage
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils import hf_tokenizer
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, AsyncActorRolloutRefWorker, CriticWorker

    from quadriga.controller import LocalWorkerGroup
    from quadriga.controller.local_group import LocalResourcePoolManager

    assert {ActorRolloutRefWorker, CriticWorker, ResourcePoolManager} - {None}

    class Mine(RayPPOTrainer):
        def fit(self) -> None:
            n = self.config.actor_rollout_ref.rollout.n
            for columns in self.train_dataloader:
                self.global_steps += 1
                new = DataProto.from_single_dict(columns)
                asked = new.pop(["input_ids", "attention_mask", "position_ids"], ["raw_prompt_ids"])
                new.non_tensor_batch["uid"] = new.non_tensor_batch["index"].astype(object)
                written = self.actor_rollout_wg.generate_sequences(asked.repeat(n, interleave=True))
                batch = new.repeat(n, interleave=True).union(written)
                batch.batch.pop("rm_scores", None)
                told = self.reward_fn(batch, return_dict=True)
                batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = told["reward_tensor"]
                batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
                batch = compute_advantage(batch, self.config.algorithm.adv_estimator, num_repeat=n)
                figures = self.actor_rollout_wg.update_actor(batch).meta_info["metrics"]
                self.seen.append(
                    (
                        float(told["reward_tensor"].sum(1).mean()),
                        figures["grad_norm" if "grad_norm" in figures else "actor/grad_norm"],
                    )
                )
                if self.global_steps == 3:
                    return

    config = composed(arguments(task, tmp_path / "run", LOCAL))
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    trainer = Mine(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping={Role.ActorRollout: AsyncActorRolloutRefWorker},
        resource_pool_manager=LocalResourcePoolManager({"global_pool": [1]}, {Role.ActorRollout: "global_pool"}),
        ray_worker_group_cls=LocalWorkerGroup,
        reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
    )
    trainer.seen = []
    trainer.init_workers()
    trainer.fit()
    assert len(trainer.seen) == 3
    assert trainer.seen[-1][0] > trainer.seen[0][0]
    assert all(torch.as_tensor(norm).float().mean() > 0 for _, norm in trainer.seen)


@pytest.mark.slow
def test_the_recipe_composed_by_hydra_trains_on_ray_with_two_workers(task: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quadriga.compat.verl", str(RECIPES / "dynamic_sampling.py")]
    more = ["trainer.n_gpus_per_node=2", "algorithm.filter_groups.metric=score", "trainer.save_freq=2"]
    done = subprocess.run(
        [*command, *arguments(task, tmp_path / "run", *more)],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = steps_of(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoints" / "global_step_3" / "huggingface").is_dir()
    assert "verl's command line:" in done.stdout, "what became of verl's keys is told"
