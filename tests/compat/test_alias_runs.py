"""Users' verl code in real runs: reward file, dataset, sampler, reward manager, runner and trainer of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))
from tiny_policy import write_model, write_prompts

USER_CODE = """
import asyncio

import torch
from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score.gsm8k import extract_solution
from verl.workers.reward_manager import AbstractRewardManager


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    extract_solution(solution_str)
    return {"score": sum(c in "aeiou" for c in solution_str) / 6 + bonus, "answer": solution_str}


class Dataset(RLHFDataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        assert config.get("max_response_length") == 6
        super().__init__(data_files, tokenizer, config, processor, max_samples)

    def _build_messages(self, example):
        return example["prompt"] + "#"

    def __getitem__(self, position):
        item = super().__getitem__(position)
        assert item["raw_prompt"].endswith("#")
        item["seen"] = "by my dataset"
        return item


class Sampler(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        assert data_config.get("sampler", {}).get("class_name") == "Sampler"
        assert len(data_source.dataframe) == len(data_source)

    def __iter__(self):
        return iter(range(len(self.data_source)))

    def update(self, batch):
        assert len(batch)


class Manager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", **kwargs):
        self.tokenizer, self.compute_score = tokenizer, compute_score

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        for i in range(len(data)):
            item = data[i]
            width = item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][width:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length])
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            told = self.compute_score(item.non_tensor_batch["data_source"], text, truth, {})
            rewards[i, max(length - 1, 0)] = told["score"]
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards


class BySample(NaiveRewardManager):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        assert config.data.max_response_length == 6
        self.bonus = config.reward.get("reward_kwargs", {}).get("bonus", 0.0)
        self.loop = asyncio.new_event_loop()

    async def run_single(self, data):
        told = await super().run_single(data)
        item = data[0]
        length = int(item.batch["attention_mask"][-item.batch["responses"].shape[-1] :].sum())
        seen = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(item.batch["responses"][:length]))
        told["reward_extra_info"]["letters"] = len(seen)
        return told | {"reward_score": told["reward_score"] + self.bonus}
"""
RECIPE = """
import sys

from omegaconf import OmegaConf

from verl.trainer.main_ppo import TaskRunner, create_rl_dataset, create_rl_sampler, run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, Role
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.fs import copy_to_local


class MyTrainer(RayPPOTrainer):
    def validate(self):
        return {"val/mine": 1.0}


class MyRunner(TaskRunner):
    def run(self, config):
        _, ray_worker_group_cls = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        pools = self.init_resource_pool_mgr(config)
        path = copy_to_local(config.actor_rollout_ref.model.path)
        tokenizer, processor = hf_tokenizer(path), hf_processor(path)
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0)
        data = config.data
        trainer = MyTrainer(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=pools,
            ray_worker_group_cls=ray_worker_group_cls,
            reward_fn=reward_fn,
            val_reward_fn=reward_fn,
            train_dataset=create_rl_dataset(data.train_files, data, tokenizer, processor),
            val_dataset=create_rl_dataset(data.val_files, data, tokenizer, processor, is_train=False),
        )
        trainer.init_workers()
        trainer.fit()


if __name__ == "__main__":
    run_ppo(OmegaConf.from_dotlist(sys.argv[1:]), task_runner_class=MyRunner)
"""


@pytest.fixture
def task(tmp_path: Path) -> list[str]:
    """verl's arguments of a short run in one process on a tiny task."""
    write_model(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "mine.py").write_text(USER_CODE)
    (tmp_path / "recipe.py").write_text(RECIPE)
    return [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"data.train_files={tmp_path}/prompts.jsonl",
        f"data.val_files={tmp_path}/prompts.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=6",
        f"reward.custom_reward_function.path={tmp_path}/mine.py",
        "reward.num_workers=1",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.logger=console",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.executor=local",
    ]


def started(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quadriga.compat.verl", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=170,
    )


def steps_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "actor/grad_norm" in line]


def test_main_ppo_runs_with_a_reward_dataset_and_sampler_written_for_verl(task: list[str], tmp_path: Path) -> None:
    own = [
        f"data.custom_cls.path={tmp_path}/mine.py",
        "data.custom_cls.name=Dataset",
        "data.sampler.class_path=pkg://mine",
        "data.sampler.class_name=Sampler",
        "+custom_reward_function.reward_kwargs.bonus=1.0",
    ]
    done = started(["-m", "verl.trainer.main_ppo", *task, *own], tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "layout only" in done.stdout
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    assert all(line["critic/score/mean"] >= 1 for line in steps), "the bonus of reward_kwargs is in every score"


@pytest.mark.slow
@pytest.mark.parametrize(("manager", "least"), [("Manager", 0), ("BySample", 3)])
def test_a_reward_manager_written_for_verl_scores_the_run(
    task: list[str], tmp_path: Path, manager: str, least: float
) -> None:
    own = [
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.module.path={tmp_path}/mine.py",
        f"reward.reward_manager.name={manager}",
        *(["+reward.reward_kwargs.bonus=3"] if least else []),
    ]
    done = started(["-m", "verl.trainer.main_ppo", *task, *own], tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    assert all(line["critic/score/mean"] >= least for line in steps)


@pytest.mark.slow
def test_a_recipe_with_its_own_runner_and_trainer_trains(task: list[str], tmp_path: Path) -> None:
    done = started(["recipe.py", *task], tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    assert steps[-1]["val/mine"] == 1.0


def test_a_refused_command_line_of_main_ppo_ends_with_the_reason(task: list[str], tmp_path: Path) -> None:
    done = started(["-m", "verl.trainer.main_ppo", *task, "actor_rollout_ref.actor.strategy=megatron"], tmp_path)
    assert done.returncode == 1
    assert "Quadriga trains with FSDP2" in done.stderr
    asynchronous = ["-m", "verl.experimental.fully_async_policy.fully_async_main", *task, "trainer.device=gpu"]
    done = started(asynchronous, tmp_path)
    assert done.returncode == 1
    assert "async_training.mode=free" in done.stdout, "it is that trainer without a key that says so"
    done = started(["-m", "verl.trainer.sft_trainer_ray", "model.path=m", "trainer.nnodes=2"], tmp_path)
    assert done.returncode == 1
    assert "on each node" in done.stderr
    assert started(["-m", "verl.trainer.nothing"], tmp_path).returncode != 0
    assert started([], tmp_path).returncode == 2
