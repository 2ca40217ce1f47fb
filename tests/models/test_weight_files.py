"""A model folder whose weights do not fit is refused with their names; none is ever filled with random numbers."""

from __future__ import annotations

import json
import logging
from contextlib import suppress

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, make_causal_lm

from quadriga.config.model_shape import count_parameters, read_model_shape
from quadriga.config.schema_models import ModelConfig
from quadriga.errors import DataError
from quadriga.models.load import load_policy, load_reward_model, load_value_model

transformers.logging.set_verbosity_error()


@pytest.fixture
def folder(tmp_path):
    settings = CONFIGS["llama"]()
    settings.tie_word_embeddings = False
    make_causal_lm(settings).save_pretrained(tmp_path)
    return tmp_path


def change(folder, weights=lambda stored: None, **settings):
    """Rewrite the weights and some values of config.json."""
    stored = load_file(folder / "model.safetensors")
    weights(stored)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | settings))


def refusal(folder, load=load_policy) -> str:
    """What is said of a folder: of one that is loaded whole, and of one whose parts are read by ranks."""
    with pytest.raises(DataError) as caught:
        load(ModelConfig(path=str(folder)))
    if load is not whole_policy:
        with pytest.raises(DataError) as of_shards:
            load(ModelConfig(path=str(folder)), shards=True)
        assert str(of_shards.value) == str(caught.value)
    return f"{caught.value.what}\n{caught.value.fix}"


def whole_policy(config):
    """What is only seen in the numbers; ranks see it when they read them (tests/engine/test_sharded_loading.py)."""
    return load_policy(config)


def test_a_missing_weight_is_named(folder):
    change(folder, lambda stored: stored.pop("model.layers.0.self_attn.q_proj.weight"))
    assert "missing: model.layers.0.self_attn.q_proj.weight" in refusal(folder)
    assert "missing: model.layers.0.self_attn.q_proj.weight" in refusal(folder, load_value_model)


def test_transformers_says_nothing_of_weights_that_it_made_up(folder):
    """They are an error, or a critic's new head."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    transformers.logging.set_verbosity_warning()
    try:
        change(folder, lambda stored: stored.pop("lm_head.weight"))
        load_value_model(ModelConfig(path=str(folder)))
        refusal(folder)
    finally:
        transformers.logging.set_verbosity_error()
        logger.removeHandler(handler)
    assert said == []


def test_an_unexpected_weight_is_named(folder):
    change(folder, lambda stored: stored.update({"model.layers.0.extra.weight": torch.ones(2)}))
    assert "unexpected: model.layers.0.extra.weight" in refusal(folder)


def test_a_weight_of_another_shape_is_named_with_both(folder):
    change(folder, lambda stored: stored.update({"model.norm.weight": torch.ones(7)}))
    assert "of another shape: model.norm.weight [7] instead of [" in refusal(folder)


def test_a_model_with_fewer_layers_than_its_config_says_is_refused(folder):
    change(folder, num_hidden_layers=4)
    said = refusal(folder)
    assert "missing: model.layers." in said
    assert "more" in said, "a long list is cut"
    assert "num_hidden_layers" in said


def test_a_head_that_is_missing_or_tied_by_mistake_is_refused(folder):
    change(folder, tie_word_embeddings=True)
    assert "tie_word_embeddings: true, but its weights hold an output head that differs" in refusal(
        folder, whole_policy
    )
    change(folder, lambda stored: stored.pop("lm_head.weight"), tie_word_embeddings=False)
    said = refusal(folder)
    assert "missing: lm_head.weight" in said
    assert "set tie_word_embeddings to true" in said
    change(folder, tie_word_embeddings=True)
    load_policy(ModelConfig(path=str(folder)))


def test_a_critic_needs_no_output_head(folder):
    """Its own is new by design, and that of a reward model or of a language model is not used."""
    change(folder, lambda stored: stored.pop("lm_head.weight"))
    load_value_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_cut_file_is_one_sentence_with_its_name(folder, share):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    said = refusal(folder)
    assert str(file) in said
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0]},
        {"data_offsets": [0, 4, 8]},
        {"data_offsets": "04"},
        {"data_offsets": None},
        {"dtype": "XX"},
        {"shape": [-1]},
        7,
    ],
)
def test_a_strange_header_is_one_sentence_with_its_name(folder, entry):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name] = {**header[name], **entry} if isinstance(entry, dict) else entry
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(DataError) as raised:
        load_policy(ModelConfig(path=str(folder)), None)
    assert str(folder) in str(raised.value)
    assert len(str(raised.value)) < 600
    with suppress(ValueError):  # what `plan` reads
        count_parameters(file)


def test_weights_that_the_disk_does_not_give_are_one_sentence(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"model.safetensors cannot be read: Input/output error"):
        load_policy(ModelConfig(path=str(folder)), None)
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read: Input/output error"):
        read_model_shape(folder)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    make_causal_lm(CONFIGS["llama"]()).save_pretrained(tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("model-0*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(tmp_path)


def test_no_layers_at_all_are_refused(folder):
    change(folder, num_hidden_layers=0)
    assert "num_hidden_layers: 0" in refusal(folder)


def test_weights_that_are_not_finite_are_named_with_their_file(folder):
    def spoil(stored):
        stored["model.norm.weight"][:2] = float("nan")

    change(folder, spoil)
    said = refusal(folder, whole_policy)
    assert f"{folder / 'model.safetensors'}: model.norm.weight has 2 of " in said


def test_a_reward_model_without_a_layer_is_refused(tmp_path):
    settings = CONFIGS["qwen2"]()
    settings.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(settings).save_pretrained(tmp_path)
    load_reward_model(ModelConfig(path=str(tmp_path)))
    change(tmp_path, lambda stored: stored.pop("model.layers.0.mlp.up_proj.weight"))
    assert "missing: model.layers.0.mlp.up_proj.weight" in refusal(tmp_path, load_reward_model)
