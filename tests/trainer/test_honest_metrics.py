"""A metric means one thing: the rollout's gap is measured before the first update, a value is the critic's before it."""

from __future__ import annotations

import json
import time

import pytest
from tiny_policy import write_task

from quadriga.engine.engine import TrainingEngine
from quadriga.trainer.main_ppo import run_ppo
from quadriga.trainer.ppo.step_metrics import throughput


def test_the_rollout_gap_is_none_of_the_updates_drift(tmp_path, capsys):
    """Four mini-batches with a large learning rate move the policy far; the engine's log-probs are still the trainer's."""
    config = write_task(tmp_path)
    config["algorithm"] = {"adv_estimator": "gae"}
    config["actor_rollout_ref"]["actor"] |= {"ppo_mini_batch_size": 2, "optim": {"lr": 0.1}}
    config["trainer"] |= {"total_training_steps": 1, "test_freq": -1}
    run_ppo(config)
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert step["rollout/logprob_diff_mean"] < 1e-4
    assert step["critic/values/mean"] == 0, "the critic starts at 0"
    assert step["critic/vpred_mean"] != 0, "and has moved within the step"
    config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 8
    config["trainer"]["default_local_dir"] = str(tmp_path / "on_policy")
    capsys.readouterr()
    run_ppo(config)
    assert " kl 0.00000" not in capsys.readouterr().out


def test_a_phase_has_the_time_of_its_work_in_one_process_too(tmp_path, monkeypatch):
    """Calls that are begun in one line and waited for in another are not free where both are the same process."""
    plain = TrainingEngine.train_mini_batch

    def slow(*args, **kwargs):
        time.sleep(0.2)
        return plain(*args, **kwargs)

    monkeypatch.setattr(TrainingEngine, "train_mini_batch", slow)
    config = write_task(tmp_path)
    config["algorithm"] = {"adv_estimator": "gae"}
    config["trainer"] |= {"total_training_steps": 1, "test_freq": -1, "executor": "local"}
    run_ppo(config)
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for role in ("actor", "critic"):
        assert 0.2 <= step[f"timing_s/update_{role}"] <= step["timing_s/step"]


def test_throughput_is_of_one_worker_under_the_name_that_says_so():
    told = throughput({"perf/total_num_tokens": 1200}, 2.0, workers=3)
    assert told["perf/throughput"] == pytest.approx(200)
    assert told["perf/total_throughput"] == pytest.approx(600)


def test_what_is_told_of_critic_kl_prompts_and_held_out_answers(tmp_path):
    """The longest prompt is as long as allowed; the first values are 0 and explain nothing, those of the next step something else."""
    config = write_task(tmp_path)
    config["algorithm"] = {"adv_estimator": "gae"}
    config["actor_rollout_ref"]["actor"] |= {"use_kl_loss": True, "kl_loss_coef": 0.25, "ppo_mini_batch_size": 4}
    config["critic"] = {"optim": {"lr": 1e-2}}
    config["data"]["max_prompt_length"] = len("say a0")
    config["trainer"] |= {"total_training_steps": 2, "test_freq": 1, "executor": "local"}
    run_ppo(config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, second = [line for line in lines if "actor/pg_loss" in line]
    assert [first[f"critic/values/{which}"] for which in ("min", "mean", "max")] == [0, 0, 0]
    assert second["critic/values/min"] < second["critic/values/mean"] < second["critic/values/max"]
    assert first["critic/vf_explained_var"] == 0
    assert second["critic/vf_explained_var"] < 1
    assert second["critic/vf_explained_var"] != 0
    assert first["actor/kl_coef"] == second["actor/kl_coef"] == 0.25
    assert 0 < first["rollout/logprob_diff_mean"] < first["rollout/logprob_diff_max"] < 1e-3
    assert first["prompt_length/clip_ratio"] == 1
    assert first["val/letters/unparsed"] == 0
    assert 0 < first["val/letters/response_length/mean"] <= 6
