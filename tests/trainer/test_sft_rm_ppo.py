"""The whole road: supervised fine-tuning, a reward model, PPO against it. Each stage improves its own figure."""

from __future__ import annotations

import json
import random

from tiny_pairs import CONSONANTS, VOWELS, pair_job, word, write_pairs
from tiny_policy import write_model, write_prompts
from tiny_sft import read_metrics

from quadriga.trainer.fsdp_sft_trainer import run_sft
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.supervised.entry import run_supervised


def test_each_stage_improves_its_own_figure(tmp_path):
    start = write_model(tmp_path / "start")
    draw = random.Random(0)
    lessons = [{"question": f"say {c}", "answer": word(VOWELS + CONSONANTS, draw)} for c in "abcdefgh" * 16]
    (tmp_path / "lessons.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lessons))
    common = {"device": "cpu", "resume_mode": "disable"}

    run_sft(
        {
            "data": {
                "train_files": str(tmp_path / "lessons.jsonl"),
                "val_files": str(tmp_path / "lessons.jsonl"),
                "train_batch_size": 32,
            },
            "model": {"partial_pretrain": str(start)},
            "optim": {"lr": 5e-3},
            "trainer": {**common, "total_epochs": 6, "test_freq": 4, "default_local_dir": str(tmp_path / "sft")},
        }
    )
    losses = [line["val/loss"] for line in read_metrics(tmp_path / "sft") if "val/loss" in line]
    assert losses[-1] < losses[0] - 0.1

    policy = tmp_path / "sft" / "huggingface"
    pairs = write_pairs(tmp_path / "pairs.jsonl", 128)
    trained = run_supervised(pair_job(pairs, policy, tmp_path / "rm", trainer={"total_training_steps": 24}), "rm")
    assert trained["val/accuracy"] > 0.95

    prompts = write_prompts(tmp_path / "prompts.jsonl")
    run_ppo(
        {
            "data": {
                "train_files": str(prompts),
                "val_files": str(prompts),
                "train_batch_size": 16,
                "max_prompt_length": 16,
                "max_response_length": 6,
                "val_max_samples": 4,
            },
            "actor_rollout_ref": {
                "model": {"path": str(policy)},
                "actor": {"optim": {"lr": 3e-3}, "ppo_mini_batch_size": 16},
                "rollout": {"n": 4},
            },
            "critic": {"optim": {"lr": 3e-3}, "ppo_mini_batch_size": 16},
            "reward_model": {"enable": True, "model": {"path": str(tmp_path / "rm" / "huggingface")}},
            "algorithm": {"adv_estimator": "gae"},
            "reward": {"num_workers": 1},
            "trainer": {
                "executor": "local",
                "device": "cpu",
                "total_training_steps": 15,
                "val_before_train": False,
                "default_local_dir": str(tmp_path / "ppo"),
            },
        }
    )
    scores = [line["critic/score/mean"] for line in read_metrics(tmp_path / "ppo")]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.5
