"""A run from a file of one's own: `--config my.yaml key=value`; and everything that is wrong with a run, told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from quadriga.commands.plan import main as plan
from quadriga.config import load_config, screen_overrides
from quadriga.config.command_line import compose_from_arguments
from quadriga.config.supervised_schema import DPOConfig, RMConfig, SFTConfig
from quadriga.errors import ConfigError


@pytest.fixture
def my_file(tmp_path: Path) -> Path:
    file = tmp_path / "my.run.yaml"
    file.write_text("trainer:\n  nnodes: 3\n  n_gpus_per_node: 2\ndata:\n  train_batch_size: 12\n")
    return file


@pytest.mark.parametrize("joined", [True, False])
def test_a_file_holds_what_is_different_and_arguments_come_after_it(my_file: Path, joined: bool):
    flag = [f"--config={my_file}"] if joined else ["--config", str(my_file)]
    arguments = screen_overrides([*flag, "trainer.nnodes=2", "ray_kwargs.ray_init.num_cpus=4"])
    config = load_config(compose_from_arguments(arguments))
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.data.train_batch_size) == (2, 2, 12)
    assert config.ray_kwargs.ray_init == {"num_cpus": 4}
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 12, (
        "a default that follows another key follows the file"
    )


@pytest.mark.parametrize("schema", [SFTConfig, RMConfig, DPOConfig])
def test_supervised_runs_take_a_file_too(tmp_path: Path, schema):
    file = tmp_path / "my.yaml"
    file.write_text("data:\n  train_files: a.jsonl\nmodel:\n  path: some/model\n")
    arguments = screen_overrides(["--config", str(file), "optim.lr=3e-5"], schema)
    config = load_config(compose_from_arguments(arguments, schema), schema)
    assert (config.data.train_files, config.model.partial_pretrain, config.optim.lr) == ("a.jsonl", "some/model", 3e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("trainer: [", "cannot be read as YAML"),
        ("- 1\n- 2\n", "holds no keys"),
        ("defaults:\n  - ppo_trainer\n", "--config-dir"),
        ("trainer:\n  nodes: 2\n", r"unknown key trainer.nodes(?s:.*)trainer.nnodes"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(tmp_path: Path, content: str, message: str):
    file = tmp_path / "my.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_config(compose_from_arguments(screen_overrides([f"--config={file}"])))


def test_a_file_that_is_not_there_and_flags_that_do_not_go_with_it_are_named(my_file: Path):
    with pytest.raises(ConfigError, match="there is no such file"):
        compose_from_arguments(["--config", "nowhere.yaml"])
    with pytest.raises(ConfigError, match="--multirun does not go with --config"):
        compose_from_arguments([f"--config={my_file}", "--multirun"])


def test_an_unknown_key_hides_neither_a_wrong_value_nor_an_impossible_combination():
    arguments = [
        "trainer.nodes=2",
        "actor_rollout_ref.actor.optim.lr=fast",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=1",
        "trainer.critic_warmup=3",
    ]
    with pytest.raises(ConfigError) as raised:
        screen_overrides(arguments)
    text = str(raised.value)
    assert text.startswith("4 problems")
    for part in ("unknown key trainer.nodes", "optim.lr='fast'", "every advantage would be 0", "trainer.critic_warmup"):
        assert part in text


def test_what_a_misspelt_or_wrong_key_would_have_set_is_not_complained_about():
    """`rollout.nn=8` most likely meant `rollout.n=8`: that grpo needs more than one response is no second problem."""
    with pytest.raises(ConfigError, match="must be a whole number") as raised:
        screen_overrides(["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=eight"])
    assert "problems" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"data.train_batch_size='many'") as raised:
        load_config(
            {"data": {"train_batch_size": "many"}, "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 256}}}
        )
    assert "problems" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.model.lora_rank", "100000"),
        ("data.max_prompt_length", "12345678901234567890"),
        ("data.max_response_length", "1e20"),
        ("reward.timeout_s", "1e-9"),
    ],
)
def test_sizes_that_nobody_can_mean_are_refused(key: str, value: str):
    with pytest.raises(ConfigError, match=f"{key}=.*must be at (most|least)"):
        screen_overrides([f"{key}={value}"])


def test_a_bound_is_written_as_a_person_would():
    with pytest.raises(ConfigError, match=r"must be at most 16,777,216\s"):
        screen_overrides(["data.max_prompt_length=12345678901234567890"])


def test_plan_says_what_train_would_about_a_missing_package(monkeypatch: pytest.MonkeyPatch):
    import importlib.util

    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else known(name, *a))
    with pytest.raises(ConfigError, match="wandb is not installed"):
        plan(["trainer.logger=[console,wandb]"])
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*unknown key trainer.nodes.*wandb is not installed"):
        plan(["trainer.logger=[console,wandb]", "trainer.nodes=1"])
