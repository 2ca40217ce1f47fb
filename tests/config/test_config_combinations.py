"""Combinations that cannot work, and batch sizes that do not divide: refused, with numbers that do work."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import pytest
from dotted import nest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quadriga.config import Config, load_config
from quadriga.config.batch_arithmetic import report_batch_sizes
from quadriga.config.typed import Problems
from quadriga.errors import ConfigError

Load = Callable[[dict[str, Any]], Config]
Problem = Callable[[dict[str, Any]], str]
ACTOR, ROLLOUT, VAL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"
IS, RS = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs"
LOSS, BYPASS = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction.bypass_mode"
GDPO = {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["a"], f"{ROLLOUT}.n": 2}
TEACHER = {"distillation.enabled": True, "distillation.teacher_models": {"one": {"model_path": "some/model"}}}
TRAIN, MINI, MICRO = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("keys", "what", "fix"),
    [
        ({"algorithm.adv_estimator": "grpo"}, "every advantage would be 0", f"{ROLLOUT}.n=2 or more"),
        ({"algorithm.adv_estimator": "rloo"}, "every advantage would be 0", f"{ROLLOUT}.n=2 or more"),
        ({"algorithm.adv_estimator": "opo"}, "every advantage would be 0", f"{ROLLOUT}.n=2 or more"),
        ({"algorithm.filter_groups.enable": True}, "every group would be dropped", f"{ROLLOUT}.n=2 or more"),
        ({"critic.enable": False}, "needs the values of a critic", "remove critic.enable"),
        (
            {"critic.enable": True, "algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2},
            "does not use its values",
            "algorithm.adv_estimator=gae",
        ),
        (
            {"trainer.critic_warmup": 5, "trainer.total_training_steps": 5},
            "the policy would never be updated",
            "trainer.critic_warmup=4",
        ),
        (
            {"data.max_response_length": 20000, f"{ACTOR}.ppo_max_token_len_per_gpu": 16384},
            "cannot hold one sequence",
            f"{ACTOR}.ppo_max_token_len_per_gpu=20512",
        ),
        (
            {
                f"{ACTOR}.use_dynamic_bsz": False,
                f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
                "critic.use_dynamic_bsz": True,
            },
            "the rows of a pass are not determined",
            MICRO,
        ),
        ({f"{ROLLOUT}.temperature": 0}, "needs actor_rollout_ref.rollout.temperature above 0", "do_sample=False"),
        ({f"{VAL}.do_sample": True}, f"needs {VAL}.temperature above 0", f"{VAL}.temperature=1.0"),
        ({f"{VAL}.n": 4}, "are all the same", f"{VAL}.do_sample=True"),
        ({f"{ROLLOUT}.top_k": 0}, "keeps no token", "top_k=-1"),
        ({"trainer.resume_mode": "resume_path"}, "resume_from_path is not set", "checkpoint folder"),
        (
            {f"{ACTOR}.optim.lr_warmup_steps": 10, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1},
            "both set the warm-up",
            "remove one of them",
        ),
        ({f"{ACTOR}.optim.betas": [0.9]}, "two numbers", "betas=[0.9,0.999]"),
        ({"critic.optim.betas": [0.9, 1.0]}, "two numbers", "critic.optim.betas=[0.9,0.999]"),
        ({"reward.on_error": "skip"}, "must be a number or 'stop'", "reward.on_error=stop"),
        ({"trainer.executor": "local", "trainer.n_gpus_per_node": 2}, "in one process", "trainer.executor=ray"),
        ({"data.train_files": []}, "names no file", "parquet"),
        ({"data.train_max_samples": 0}, "leaves no rows", "data.train_max_samples=-1"),
        ({"data.train_max_samples": 10}, "do not fill one step", "data.train_batch_size=10 or less"),
        ({f"{ROLLOUT}.response_length": 100}, "must be equal", "set only data.max_response_length"),
        ({"data.custom_cls.path": "my.py"}, "data.custom_cls.name is not set", "the class in that file"),
        (
            {"ray_kwargs.ray_init.timeline_json_file": "t.json"},
            "not an argument of ray.init",
            "ray_kwargs.timeline_json_file",
        ),
        ({IS: "token", f"{IS}_threshold": "2_1"}, "nor lo_hi", "0.5_2.0"),
        ({LOSS: "decoupled", IS: "token"}, "would do it a second time", f"remove {IS}"),
        ({LOSS: "decoupled", BYPASS: True}, "every weight would be 1", f"{BYPASS}=False"),
        ({LOSS: "decoupled", **TEACHER}, "not that of the teachers", "use_policy_gradient=True"),
        ({LOSS: "vespo", IS: "sequence"}, "would count once for every token", f"{IS}=token"),
        (
            {LOSS: "clip_cov", f"{ACTOR}.policy_loss.clip_cov_lb": 5.0, f"{ACTOR}.policy_loss.clip_cov_ub": 1.0},
            "no token could be held",
            "clip_cov_lb=1.0",
        ),
        ({**GDPO, "algorithm.length_reward": "kimi"}, "gdpo does not read", "algorithm.gdpo_reward_keys"),
        ({**GDPO, "reward_model.enable": True, "reward_model.model.path": "rm"}, "gdpo does not read", "remove it"),
        ({RS: "token"}, "unknown name 'token'", "token_k1"),
        ({RS: "token_k1"}, "0 bounds for 1 names", "0.5_2.0"),
        ({RS: "token_k1,seq_mean_k3", f"{RS}_threshold": "0.5_2.0"}, "no bound for seq_mean_k3", "one upper bound"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_impossible_combination_is_refused(problem: Problem, keys: dict[str, Any], what: str, fix: str) -> None:
    found = problem(keys)
    assert what in found
    assert fix in found.replace(what, "")


def test_possible_neighbours_of_impossible_combinations_load(load: Load) -> None:
    load({"algorithm.adv_estimator": "remax"})
    load({"algorithm.adv_estimator": "my.module:estimator", "critic.enable": True})
    load({f"{VAL}.n": 4, f"{VAL}.do_sample": True, f"{VAL}.temperature": 0.6})
    load({"trainer.executor": "local"})
    load({LOSS: "vespo", IS: "token"})
    load({LOSS: "decoupled", **TEACHER, "distillation.distillation_loss": {"use_policy_gradient": True}})
    load({RS: "token_k1,seq_mean_k3", f"{RS}_threshold": "0.5_2.0,0.01"})
    load({"data.max_response_length": 20000, f"{ACTOR}.ppo_max_token_len_per_gpu": 20512})


def test_seed_example_with_8_workers_on_2_nodes_loads(load: Load) -> None:
    load({"trainer.n_gpus_per_node": 8, "trainer.nnodes": 2})


def test_batch_that_is_no_multiple_of_the_mini_batch_names_the_nearest_numbers(problem: Problem) -> None:
    assert problem({TRAIN: 100, MINI: 64}) == (
        f"{TRAIN}=100 prompts cannot be split into mini-batches of {MINI}=64 prompts\n"
        f"  fix: set {MINI}=50 or 100, or {TRAIN}=64 or 128"
    )


def test_rows_that_workers_cannot_share_name_the_nearest_numbers(problem: Problem) -> None:
    message = problem(
        {TRAIN: 60, MINI: 30, "trainer.n_gpus_per_node": 8, "algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2}
    )
    assert (
        "30 prompts x actor_rollout_ref.rollout.n=2 responses = 60 rows cannot be shared evenly by 8 workers" in message
    )
    assert f"fix: set {MINI}=20 or 60" in message


def test_micro_batch_larger_than_a_workers_share_is_refused(problem: Problem) -> None:
    message = problem({TRAIN: 64, "trainer.n_gpus_per_node": 8, MICRO: 16, "critic.use_dynamic_bsz": True})
    assert "more than the 8 rows that each of 8 workers gets" in message
    assert f"set {MICRO}=8 or less" in message


def test_rows_need_not_divide_into_micro_batches(load: Load) -> None:
    load({TRAIN: 64, MICRO: 7})


def suggestions(fix: str) -> list[dict[str, int]]:
    """The settings that a fix of the batch arithmetic proposes, each as keys and values."""
    found = []
    for option in fix.removeprefix("set ").split(", or "):
        if " with " in option:
            found.append({k: int(v) for k, v in re.findall(r"([\w.]+)=(\d+)", option)})
        else:
            key, values = option.split("=")
            found += [{key: int(value)} for value in values.split(" or ")]
    return found


numbers = st.fixed_dictionaries(
    {
        TRAIN: st.integers(1, 200),
        MINI: st.integers(1, 80),
        f"{ROLLOUT}.n": st.integers(2, 9),
        "trainer.n_gpus_per_node": st.integers(1, 16),
        MICRO: st.none() | st.integers(1, 12),
        "algorithm.adv_estimator": st.just("grpo"),
    }
)


defaults = cache(lambda: load_config({}))


def batch_problems(keys: dict[str, Any]) -> Problems:
    """What the batch arithmetic alone says about these keys, which is faster than loading them."""
    config, problems = copy.deepcopy(defaults()), Problems()
    for path, value in keys.items():
        *sections, last = path.split(".")
        setattr(reduce(getattr, sections, config), last, value)
    report_batch_sizes(config, problems)
    return problems


@settings(max_examples=500, deadline=None)
@given(keys=numbers)
def test_every_number_that_an_error_proposes_is_valid(keys: dict[str, Any]) -> None:
    found = batch_problems(keys).found
    if not found:
        assert keys[TRAIN] % keys[MINI] == 0
        assert keys[MINI] * keys[f"{ROLLOUT}.n"] % keys["trainer.n_gpus_per_node"] == 0
    for what, fix in found:
        proposed = [{MICRO: int(fix.split("=")[1].split()[0])}] if what.startswith(MICRO) else suggestions(fix)
        assert proposed
        for setting in proposed:
            assert batch_problems({**keys, **setting}).found == []


@settings(max_examples=15, deadline=None)
@given(keys=numbers)
def test_proposed_numbers_load(keys: dict[str, Any]) -> None:
    try:
        load_config(nest(keys))
    except ConfigError as error:
        assume(not error.what.startswith(MICRO))
        for setting in suggestions(error.fix):
            load_config(nest({**keys, **setting}))
