"""Whole training runs with the losses, estimators and corrections that need more than a batch's own columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tiny_policy import write_task

from quadriga.trainer.main_ppo import run_ppo


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def train(task, tmp_path):
    def run(steps=8, folder="run", **changes) -> list[dict]:
        trainer = {
            "default_local_dir": str(tmp_path / folder),
            "total_training_steps": steps,
            "executor": "local",
            "max_restarts": 3,
        }
        config = OmegaConf.to_container(OmegaConf.merge(task, {"trainer": trainer}, changes))
        run_ppo(config)
        lines = (Path(config["trainer"]["default_local_dir"]) / "metrics.jsonl").read_text().splitlines()
        return [m for m in map(json.loads, lines) if "critic/score/mean" in m]

    return run


def gain(metrics: list[dict]) -> float:
    scores = [m["critic/score/mean"] for m in metrics]
    return sum(scores[-2:]) / 2 - scores[0]


def actor(loss_mode: str, **policy_loss) -> dict:
    """Several mini-batches and passes, so that the policy moves away from the one that sampled."""
    return {
        "actor": {
            "ppo_mini_batch_size": 4,
            "ppo_epochs": 2,
            "shuffle": True,
            "policy_loss": {"loss_mode": loss_mode, **policy_loss},
            "optim": {"lr": 5e-3},
        }
    }


GRPO = {"adv_estimator": "grpo"}
BYPASS = {"bypass_mode": True}


@pytest.mark.parametrize(
    ("policy", "algorithm", "tells"),
    [
        (actor("clip_cov", clip_cov_lb=0.0, clip_cov_ratio=0.01), GRPO, "actor/pg_clipfrac"),
        (actor("kl_cov", kl_cov_ratio=0.01, entropy_top_ratio=0.8), GRPO, "actor/ppo_kl"),
        (actor("decoupled", proximal="loglinear", opsm_delta=0.5), GRPO, "actor/opsm_dropped"),
        (actor("prime_rl"), {**GRPO, "rollout_correction": BYPASS}, "actor/k3_kept"),
        (
            actor("vanilla"),
            {
                **GRPO,
                "rollout_correction": {
                    **BYPASS,
                    "loss_type": "reinforce",
                    "rollout_is": "token",
                    "rollout_rs": "seq_mean_k1",
                    "rollout_rs_threshold": 20.0,
                },
            },
            "rollout_corr/is_mean",
        ),
        (actor("sapo"), {**GRPO, "rollout_correction": {"m2po_threshold": 0.04}}, "rollout_corr/m2po_dropped"),
        ({}, {"adv_estimator": "optimal_token_baseline"}, "timing_s/old_log_prob"),
        (
            {},
            {"adv_estimator": "gdpo", "gdpo_reward_keys": ["score", "always_one"], "gdpo_reward_weights": [1.0, 0.5]},
            "gdpo/always_one/groups_without_spread",
        ),
        ({}, {"adv_estimator": "gigpo", "use_pf_ppo": True, "length_reward": "kimi"}, "training/pf_ppo_distinct"),
    ],
    ids=["clip_cov", "kl_cov", "decoupled", "prime_rl", "reinforce", "m2po", "token_baseline", "gdpo", "gigpo"],
)
def test_it_learns_and_says_what_it_does(train, policy, algorithm, tells):
    metrics = train(algorithm=algorithm, actor_rollout_ref=policy)
    assert gain(metrics) > 0.1
    assert tells in metrics[-1]


def test_the_adaptive_entropy_bonus_grows_while_the_entropy_is_low_and_survives_a_resume(train):
    bonus = {"actor": {"adaptive_entropy": {"enable": True, "target": 100.0, "step_size": 0.5, "max_coeff": 0.8}}}
    whole = train(5, "whole", algorithm=GRPO, actor_rollout_ref=bonus)
    assert [m["actor/entropy_coeff"] for m in whole] == [0.0, 0.5, 0.8, 0.8, 0.8]
    train(2, "cut", algorithm=GRPO, actor_rollout_ref=bonus, trainer={"save_freq": 2})
    resumed = train(5, "cut", algorithm=GRPO, actor_rollout_ref=bonus)
    assert [m["actor/entropy_coeff"] for m in resumed] == [m["actor/entropy_coeff"] for m in whole]
    assert [m["actor/loss"] for m in resumed] == [m["actor/loss"] for m in whole]


def test_a_step_of_which_nothing_is_left_trains_nothing_and_the_run_goes_on(train):
    """All responses are of full length; gdpo and gae would whiten over no token at all."""
    cut = {"data": {"max_response_length": 1}}
    gdpo = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["score"], "overlong_filter": True}
    for algorithm in (gdpo, {"adv_estimator": "gae", "overlong_filter": True}):
        metrics = train(2, algorithm["adv_estimator"], algorithm=algorithm, **cut)
        assert [m["response_length/filtered"] for m in metrics] == [1.0, 1.0]
        assert [m["actor/grad_norm"] for m in metrics] == [0.0, 0.0]


def test_a3po_makes_no_pass_for_old_log_probs(train):
    estimated = train(2, "a", algorithm=GRPO, actor_rollout_ref=actor("decoupled", proximal="loglinear"))
    assert "timing_s/old_log_prob" not in estimated[-1]
    recomputed = train(2, "b", algorithm=GRPO, actor_rollout_ref=actor("decoupled"))
    assert "timing_s/old_log_prob" in recomputed[-1]


def test_overlong_responses_leave_the_loss(train):
    metrics = train(2, algorithm={**GRPO, "overlong_filter": True})
    assert all(0 < m["response_length/filtered"] < 1 for m in metrics)
    assert all(m["response_length/mean"] < 6 for m in metrics)
