"""The SFT configuration: what is accepted, what is refused and how, and the YAML file."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from quadriga.config import load_config, screen_overrides
from quadriga.config.command_line import config_file
from quadriga.config.render import SUPERVISED_PAGE, render_supervised_page, render_yaml
from quadriga.config.supervised_schema import SCHEMAS, DPOConfig, RMConfig, SFTConfig
from quadriga.config.typed import default_values
from quadriga.errors import ConfigError

COMPLETE = {"data": {"train_files": "a.jsonl"}, "model": {"partial_pretrain": "some/model"}}


def load_sft(source):
    return load_config(source, SFTConfig)


def screen_sft(arguments):
    return screen_overrides(arguments, SFTConfig)


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_yaml_files_are_rendered_from_their_schema(schema):
    assert config_file(schema).read_text(encoding="utf-8") == render_yaml(schema), (
        "run `python -m quadriga.config.render --write`"
    )
    values = OmegaConf.to_container(OmegaConf.load(config_file(schema)), resolve=False)
    del values["hydra"]
    assert values == default_values(schema)


def test_the_reference_page_is_rendered_from_the_schemas():
    if not SUPERVISED_PAGE.parent.is_dir():
        pytest.skip("needs docs/ of the checkout")
    assert SUPERVISED_PAGE.read_text(encoding="utf-8") == render_supervised_page(), (
        "run `python -m quadriga.config.render --write`"
    )


def test_a_few_keys_are_enough_and_the_rest_has_defaults():
    config = load_sft(COMPLETE)
    assert (config.data.train_batch_size, config.optim.lr_scheduler, config.data.seed) == (256, "cosine", 1)
    assert load_sft(config) == config
    assert load_sft({**COMPLETE, "trainer": {"seed": 5}}).data.seed == 5


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
        (
            {"data": {**COMPLETE["data"], "multiturn": {"messages_key": "chat"}}},
            "no effect: data.multiturn.enable=False",
        ),
        ({"data": {**COMPLETE["data"], "multiturn": {"tools_key": "t"}}}, "no tools"),
        ({"ulysses_sequence_parallel_size": 2}, "write model.ulysses_sequence_parallel_size=2"),
        ({"trainer": {"checkpoint": {"save_contents": ["sharded"]}}}, "always holds weights, optimiser"),
        ({"trainer": {"resume_mode": "resume_path"}}, "do not go together"),
        ({"data": {**COMPLETE["data"], "max_length": 99, "max_token_len_per_gpu": 50}}, "no room for one row"),
        ({"data": {**COMPLETE["data"], "max_token_len_per_gpu": "most"}}, "set a number of tokens, or auto"),
    ],
)
def test_what_cannot_run_is_refused_with_its_fix(changes, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_sft({**COMPLETE, **changes})


def test_keys_of_other_trainers_that_ask_for_what_is_done_anyway_are_dropped():
    arguments = [
        "use_remove_padding=true",
        "model.strategy=fsdp2",
        "trainer.n_gpus_per_node=8",
        "trainer.checkpoint.save_contents=[model,optimizer,extra]",
        "data.balance_dp_token=True",
    ]
    assert screen_sft([*arguments, "optim.lr=1e-4"]) == ["optim.lr=1e-4"]


def test_everything_wrong_with_a_command_line_is_told_at_once():
    with pytest.raises(
        ConfigError,
        match=r"(?s)4 problems.*optim.learning_rate.*trainer.epoch.*train_files is not set.*model.partial_pretrain",
    ):
        screen_sft(["optim.learning_rate=1", "trainer.epoch=3", "data.max_length=9"])


def test_plain_paths_survive_the_command_line():
    (argument,) = screen_sft(["data.train_files=~/data/train.parquet"])
    assert "~/data/train.parquet" in argument


def test_conversations_can_be_asked_for_in_two_ways():
    def messages_key(**data):
        return load_sft({**COMPLETE, "data": {**COMPLETE["data"], **data}}).data.messages_key

    assert messages_key(multiturn={"enable": True}) == messages_key(messages_key="messages") == "messages"
    assert messages_key(multiturn={"enable": True, "messages_key": "chat"}) == "chat"
    assert messages_key() is None


@pytest.mark.parametrize(
    ("schema", "changes", "message"),
    [
        (RMConfig, {"model": {}}, "model.partial_pretrain is not set"),
        (RMConfig, {"model": {"partial_pretrain": "a/b", "lora_rank": 8}}, "trains all its weights"),
        (DPOConfig, {"dpo": {"beta": 0}}, "dpo.beta=0"),
        (DPOConfig, {"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}, "dpo.label_smoothing=0.1 has no effect"),
        (DPOConfig, {"dpo": {"loss_type": "hinge"}}, "one of sigmoid, ipo"),
    ],
)
def test_preference_runs_that_make_no_sense_are_refused(schema, changes, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load_config({**COMPLETE, **changes}, schema)
