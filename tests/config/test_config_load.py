"""Loading: sources, types, unknown keys, and errors that say what, where and how to mend it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from quadriga.config import Config, as_plain_dict, compose, load_config
from quadriga.config.needs import (
    need_critic,
    need_reference_policy,
    need_reward_model,
    uses_token_budget,
)
from quadriga.config.placement import learning_slots
from quadriga.config.typed import all_keys, default_of, nearest_keys
from quadriga.errors import ConfigError
from quadriga.registry import allow_name

Load = Callable[[dict[str, Any]], Config]
Problem = Callable[[dict[str, Any]], str]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_empty_source_gives_the_defaults(load: Load) -> None:
    config = load({})
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (1, 1)
    assert config.data.train_files == "builtin:arithmetic/train"


def test_all_sources_give_the_same_configuration() -> None:
    plain = {"trainer": {"nnodes": 2, "experiment_name": "x"}, "data": {"train_files": ["a.parquet", "b.parquet"]}}
    expected = load_config(plain)
    assert load_config(OmegaConf.create(plain)) == expected
    assert (
        load_config(
            compose(["trainer.nnodes=2", "trainer.experiment_name=x", "data.train_files=[a.parquet,b.parquet]"])
        )
        == expected
    )
    assert load_config(expected) == expected


def test_source_is_not_changed() -> None:
    source = {"trainer": {"nnodes": 2}}
    before = copy.deepcopy(source)
    load_config(source)
    assert source == before


def test_section_without_keys_means_its_defaults(load: Load) -> None:
    assert load_config({"trainer": None}) == load({})


@pytest.mark.parametrize("source", ["config.yaml", None, 3, ["trainer.nnodes=2"]])
def test_source_that_is_no_configuration_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"OmegaConf\.load"):
        load_config(source)


def test_round_trip_through_plain_values_and_pickle(load: Load) -> None:
    config = load({"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 4, "ray_kwargs.ray_init": {"num_cpus": 4}})
    assert load_config(as_plain_dict(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config
    text = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
    assert load_config(OmegaConf.create(text)) == config  # type: ignore[arg-type]


def test_keys_follow_others_until_they_are_set(load: Load) -> None:
    config = load({"data.train_batch_size": 32, "actor_rollout_ref.model.path": "my/model"})
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 32
    assert config.critic.model.path == "my/model"
    config = load({"data.train_batch_size": 32, "critic.ppo_mini_batch_size": 16})
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 32
    assert config.critic.ppo_mini_batch_size == 16
    assert load({"trainer.experiment_name": "x"}).trainer.default_local_dir == "outputs/quadriga/x"


def test_interpolation_of_the_user_is_resolved(load: Load) -> None:
    config = load({"trainer.rollout_data_dir": "${trainer.default_local_dir}/rollouts"})
    assert config.trainer.rollout_data_dir == f"outputs/quadriga/{config.trainer.experiment_name}/rollouts"


def test_interpolation_of_a_missing_key_names_the_key(problem: Problem) -> None:
    message = problem({"trainer.rollout_data_dir": "${trainer.no_such_key}"})
    assert "trainer.rollout_data_dir" in message
    assert "trainer.no_such_key" in message


def test_mandatory_value_left_open_is_named(problem: Problem) -> None:
    assert "trainer.project_name" in problem({"trainer.project_name": "???"})


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("trainer.nnodes", "2", 2),
        ("trainer.nnodes", 2.0, 2),
        ("data.train_batch_size", "1e3", 1000),
        ("actor_rollout_ref.actor.optim.lr", "1e-5", 1e-5),
        ("reward.timeout_s", 3, 3.0),
        ("reward.on_error", -1, -1.0),
        ("reward.on_error", "stop", "stop"),
        ("trainer.logger", "wandb", ["wandb"]),
        ("trainer.logger", [], []),
        ("trainer.experiment_name", 42, "42"),
        ("data.train_files", ["a", "b"], ["a", "b"]),
        ("ray_kwargs.ray_init", None, {}),
    ],
)
def test_value_is_converted_where_nothing_is_lost(load: Load, path: str, value: Any, expected: Any) -> None:
    node: Any = load({path: value})
    for part in path.split("."):
        node = getattr(node, part)
    assert node == expected
    assert type(node) is type(expected)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("trainer.nnodes", "two", "must be a whole number, got text"),
        ("trainer.nnodes", 1.5, "must be a whole number"),
        ("trainer.nnodes", True, "must be a whole number, got true or false"),
        ("trainer.nnodes", None, "must be a whole number, got null"),
        ("trainer.nnodes", [1], "must be a whole number, got a list"),
        ("trainer.nnodes", 0, "must be at least 1"),
        ("trainer.val_only", "yes", "must be true or false, got text"),
        ("trainer.val_only", 1, "must be true or false, got a whole number"),
        ("trainer.total_training_steps", "many", "must be a whole number or null, got text"),
        ("trainer.device", "gpu", "must be one of cuda, npu, cpu"),
        ("trainer.logger", ["console", "wanb"], "did you mean wandb?"),
        ("algorithm.adv_estimator", "grop", "did you mean grpo?"),
        ("algorithm.adv_estimator", "my function", "or your own as module:function"),
        ("algorithm.gamma", 1.5, "must be at most 1"),
        ("algorithm.gamma", float("nan"), "must be finite"),
        ("reward.timeout_s", float("inf"), "must be finite"),
        ("reward.timeout_s", 0, "must be at least 0.01"),
        (f"{ACTOR}.clip_ratio_c", 1.0, "must be above 1"),
        (f"{ROLLOUT}.name", "sglang", "must be one of native, vllm"),
        ("data.apply_chat_template_kwargs", 3, "must be a mapping"),
        ("data.train_files", {"a": 1}, "must be text or a list of text, got a mapping"),
    ],
)
def test_wrong_value_is_refused_with_key_value_and_reason(problem: Problem, path: str, value: Any, reason: str) -> None:
    message = problem({path: value})
    assert message.startswith(f"{path}={value!r}: ")
    assert reason in message
    assert "\n  fix: " in message


def test_wrong_value_is_reported_once_although_others_follow_it(problem: Problem) -> None:
    message = problem({f"{ACTOR}.ppo_epochs": "x"})
    assert "problems" not in message
    assert "critic" not in message


@pytest.mark.parametrize("own", ["my_package.module:function", "rewards/file.py:function", "m:Class.method"])
def test_own_code_is_accepted_where_names_are_open(load: Load, own: str) -> None:
    config = load({"algorithm.adv_estimator": own, f"{ACTOR}.policy_loss.loss_mode": own})
    assert config.algorithm.adv_estimator == own


def test_name_that_a_registry_adds_is_accepted(load: Load, problem: Problem) -> None:
    assert "must be one of" in problem({f"{ACTOR}.policy_loss.loss_mode": "added_in_test"})
    allow_name(f"{ACTOR}.policy_loss.loss_mode", "added_in_test")
    assert load({f"{ACTOR}.policy_loss.loss_mode": "added_in_test"})


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("trainer.nodes", "trainer.nnodes"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("trainer.total_epoch", "trainer.total_epochs"),
        ("data.train_batchsize", "data.train_batch_size"),
        ("actor_rollout_ref.actor.lr", f"{ACTOR}.optim.lr"),
        ("actor.optim.lr", f"{ACTOR}.optim.lr"),
        ("rollout.temperature", f"{ROLLOUT}.temperature"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("trainner.nnodes", "trainer.nnodes"),
        ("actor_rollout_ref.rollot", ROLLOUT),
        ("critic.cliprange", "critic.cliprange_value"),
    ],
)
def test_unknown_key_names_the_nearest(problem: Problem, path: str, nearest: str) -> None:
    message = problem({path: 1})
    assert message.startswith(f"unknown key {path}\n  fix: did you mean ")
    assert nearest in message


def test_unknown_key_without_a_near_one_points_to_the_list(problem: Problem) -> None:
    assert problem({"quux": 1}) == "unknown key quux\n  fix: remove it; docs/configuration.md lists every key"


def test_unknown_section_reports_each_of_its_keys(problem: Problem) -> None:
    message = problem({"actor_rollout.actor.ppo_epochs": 2, "actor_rollout.rollout.n": 4})
    assert "2 problems" in message
    assert "unknown key actor_rollout.actor.ppo_epochs" in message
    assert "unknown key actor_rollout.rollout.n" in message


def test_section_given_as_a_value_is_refused_with_its_keys() -> None:
    with pytest.raises(ConfigError, match=r"trainer must be a section with keys, got 5[\s\S]*nnodes"):
        load_config({"trainer": 5})


def test_key_with_dots_is_refused_with_the_nested_form() -> None:
    with pytest.raises(ConfigError, match=r"nest it: trainer: \{nnodes: …\}"):
        load_config({"trainer.nnodes": 2})


def test_uncomposed_defaults_list_is_refused() -> None:
    load_config({"defaults": ["_self_"]})
    with pytest.raises(ConfigError, match="nobody has composed"):
        load_config({"defaults": ["_self_", {"model": "big"}]})


def test_all_problems_are_reported_together(problem: Problem) -> None:
    message = problem({"trainer.nodes": 2, "data.seed": "x", "algorithm.gamma": 7, f"{ACTOR}.megatron.tp": 2})
    assert message.startswith("4 problems in the configuration:")
    for part in ("trainer.nodes", "data.seed='x'", "algorithm.gamma=7", f"{ACTOR}.megatron.*"):
        assert part in message
    assert message.count("fix: ") == 4


def test_error_keeps_its_message_through_pickle(problem: Problem) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"trainer": {"nodes": 2}})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_near_spellings_of_every_key_lead_back_to_it() -> None:
    for path in all_keys(Config):
        section, _, name = path.rpartition(".")
        if len(name) >= 6:
            misspelt = f"{section}.{name[:3]}{name[4:]}"
            assert path in nearest_keys(Config, misspelt), misspelt


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_single_value_is_accepted_or_refused_by_name(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(all_keys(Config))))
    value = data.draw(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just([]), st.just({}))
    )
    nested: Any = value
    for part in reversed(path.split(".")):
        nested = {part: nested}
    message, config = "", None
    try:
        config = load_config(nested)
    except ConfigError as error:
        message = str(error)
    if config is None:
        assert "fix: " in message
        assert path.rsplit(".", 1)[-1] in message
    else:
        assert load_config(as_plain_dict(config)) == config


def test_default_of_every_key_can_be_set_explicitly(load: Load) -> None:
    assert load({path: default_of(Config, path) for path in all_keys(Config)}) == load({})


def test_needs_work_on_typed_and_untyped_configurations() -> None:
    overrides = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", f"{ACTOR}.use_kl_loss=True", "trainer.nnodes=2"]
    untyped = compose(overrides)
    for config in (untyped, load_config(untyped)):
        assert not need_critic(config)
        assert need_reference_policy(config)
        assert not need_reward_model(config)
        assert learning_slots(config) == 2
        assert uses_token_budget(config.actor_rollout_ref.actor)
        assert uses_token_budget(config.actor_rollout_ref.ref)
    assert need_critic(compose([]))
    assert not need_reference_policy(compose([]))


def test_rows_or_tokens_fill_a_pass(load: Load) -> None:
    config = load({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": None})
    assert not uses_token_budget(config.actor_rollout_ref.actor)
    assert not uses_token_budget(config.critic), "the critic follows the actor"
    assert uses_token_budget(config.actor_rollout_ref.rollout)
    assert uses_token_budget(config.reward_model)
