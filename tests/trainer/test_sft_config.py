"""The SFT configuration: what is accepted, what is refused and how, and the YAML file."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from quadriga.config.sft_load import CONFIG_FILE, load_sft_config, render_sft_yaml, screen_sft_overrides
from quadriga.config.sft_schema import SFTConfig
from quadriga.config.typed import default_values
from quadriga.errors import ConfigError

COMPLETE = {"data": {"train_files": "a.jsonl"}, "model": {"partial_pretrain": "some/model"}}


def load(**changes):
    return load_sft_config(OmegaConf.merge(COMPLETE, OmegaConf.from_dotlist([f"{k}={v}" for k, v in changes.items()])))


def test_yaml_file_is_rendered_from_the_schema():
    assert CONFIG_FILE.read_text(encoding="utf-8") == render_sft_yaml(), (
        "run `python -m quadriga.config.sft_load --write`"
    )
    values = OmegaConf.to_container(OmegaConf.load(CONFIG_FILE), resolve=False)
    del values["hydra"]
    assert values == default_values(SFTConfig)


def test_a_few_keys_are_enough_and_the_rest_has_defaults():
    config = load_sft_config(COMPLETE)
    assert (config.data.train_batch_size, config.optim.lr_scheduler, config.data.seed) == (256, "cosine", 1)
    assert load_sft_config(config) == config
    assert load_sft_config({**COMPLETE, "trainer": {"seed": 5}}).data.seed == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {**COMPLETE["data"], "train_bach_size": 8}}, "data.train_bach_size.*\n.*data.train_batch_size"),
        ({"optim": {"lr": "fast"}}, "optim.lr='fast': must be a number"),
        ({"optim": {"lr_scheduler": "cosin"}}, "did you mean cosine"),
        ({"optim": {"betas": [0.9]}}, "two numbers"),
        ({"data": {}}, "data.train_files is not set"),
        ({"model": {}}, "model.partial_pretrain .* or model.from_config"),
        ({"model": {"partial_pretrain": "a/b", "from_config": "c"}}, "exactly one"),
        ({"trainer": 3}, "trainer must be a section"),
        ({"data": {**COMPLETE["data"], "multiturn": {"enable": True}}}, "data.messages_key=messages"),
        ({"ulysses_sequence_parallel_size": 2}, "not split over GPUs"),
        ({"trainer": {"save_freq": 10}}, "always writes the model"),
        ({"data": {**COMPLETE["data"], "max_length": 99, "max_token_len_per_gpu": 50}}, "no room for one row"),
    ],
)
def test_what_cannot_run_is_refused_with_its_fix(changes, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_sft_config({**COMPLETE, **changes})


def test_keys_of_other_trainers_that_ask_for_what_is_done_anyway_are_dropped():
    arguments = [
        "use_remove_padding=true",
        "model.strategy=fsdp2",
        "trainer.n_gpus_per_node=8",
    ]
    assert screen_sft_overrides([*arguments, "optim.lr=1e-4"]) == ["optim.lr=1e-4"]


def test_all_unknown_keys_of_a_command_line_are_told_at_once():
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*optim.learning_rate.*trainer.epoch"):
        screen_sft_overrides(["optim.learning_rate=1", "trainer.epoch=3", "data.max_length=9"])


def test_plain_paths_survive_the_command_line():
    (argument,) = screen_sft_overrides(["data.train_files=~/data/train.parquet"])
    assert "~/data/train.parquet" in argument
