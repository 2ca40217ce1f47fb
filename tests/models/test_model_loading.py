from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
import transformers
from tiny_models import CONFIGS, UNSUPPORTED, VOCABULARY, make_causal_lm, ragged_batch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from quadriga.config import load_config
from quadriga.config.schema_models import ModelConfig
from quadriga.errors import ConfigError, DataError
from quadriga.models import source
from quadriga.models.load import end_token_ids, load_policy, load_reward_model, load_tokenizer, load_value_model
from quadriga.models.packing import pack_rows
from quadriga.models.source import resolve_model_path


def config(path, **changes):
    return ModelConfig(path=str(path), override_config={}, **changes)


def tokenizer_of_size(size):
    vocabulary = {f"w{i}": i for i in range(size)}
    core = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w2", unk_token="w0")


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_causal_lm(CONFIGS["llama"]()).save_pretrained(folder)
    tokenizer_of_size(VOCABULARY).save_pretrained(folder)
    return folder


@pytest.fixture
def packed():
    return pack_rows(*ragged_batch([(3, 4), (2, 5), (4, 1)]))


def test_a_policy_is_float32_trainable_and_gives_the_log_probs_of_its_folder(llama_folder, packed):
    policy = load_policy(config(llama_folder), load_tokenizer(llama_folder))
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in policy.parameters())
    own = transformers.AutoModelForCausalLM.from_pretrained(llama_folder, attn_implementation="eager")
    ids = packed.input_ids[:, :7]
    logits = own(input_ids=ids).logits[0, 2:6]
    expected = logits.log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
    torch.testing.assert_close(policy(packed)["log_probs"][:4], expected, atol=1e-5, rtol=1e-5)


def test_a_reference_is_frozen(llama_folder):
    policy = load_policy(config(llama_folder), trainable=False)
    assert not any(p.requires_grad for p in policy.parameters())
    assert not policy.training


def test_dropout_is_off_unless_the_user_asks_for_it(tmp_path, packed):
    make_causal_lm(CONFIGS["gpt2"]()).save_pretrained(tmp_path)
    policy = load_policy(config(tmp_path)).train()
    assert torch.equal(policy(packed)["log_probs"], policy(packed)["log_probs"])
    wanted = ModelConfig(path=str(tmp_path), override_config={"resid_pdrop": 0.5})
    policy = load_policy(wanted).train()
    assert not torch.equal(policy(packed)["log_probs"], policy(packed)["log_probs"])


def test_an_unknown_key_in_override_config_names_the_nearest(llama_folder):
    with pytest.raises(ConfigError, match="attention_dropuot") as caught:
        load_policy(ModelConfig(path=str(llama_folder), override_config={"attention_dropuot": 0.1}))
    assert "attention_dropout" in caught.value.fix


def test_a_value_model_starts_at_zero_everywhere_and_its_head_can_learn(llama_folder, packed):
    model = load_value_model(config(llama_folder))
    values = model(packed)["values"]
    assert values.shape == packed.targets.shape
    assert not values.any()
    values.sum().backward()
    assert model.head.weight.grad.abs().min() > 0


def test_a_reward_model_scores_like_its_own_classifier(tmp_path, packed):
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    settings = CONFIGS["qwen2"]()
    settings.num_labels = 1
    classifier = transformers.AutoModelForSequenceClassification.from_config(settings).eval()
    classifier.save_pretrained(tmp_path)
    scores = load_reward_model(config(tmp_path))(packed, at_last_token=True)["values"]
    bounds = packed.layout.cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        expected = classifier(input_ids=packed.input_ids[:, start:end]).logits[0, 0]
        torch.testing.assert_close(scores[i], expected, atol=1e-5, rtol=1e-5)


def test_a_causal_lm_is_no_reward_model(llama_folder):
    with pytest.raises(DataError, match=r"not a reward model with one label.*score"):
        load_reward_model(config(llama_folder))


def test_lora_trains_the_adapter_only_and_can_be_switched_off(llama_folder, packed):
    plain = load_policy(config(llama_folder), trainable=False)
    policy = load_policy(config(llama_folder, lora_rank=4))
    trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trainable
    assert all("lora_" in name for name in trainable)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    expected = plain(packed)["log_probs"]
    assert (policy(packed)["log_probs"] - expected).abs().max() > 1e-3
    with policy.adapter_off():
        torch.testing.assert_close(policy(packed)["log_probs"], expected, atol=1e-6, rtol=1e-6)


def test_a_run_starts_from_an_adapter_whose_rank_and_modules_hold(llama_folder, packed, tmp_path):
    first = load_policy(config(llama_folder, lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    for name, parameter in first.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    first.causal_lm.save_pretrained(tmp_path)
    whole = load_config(
        {"actor_rollout_ref": {"model": {"path": str(llama_folder), "lora_adapter_path": str(tmp_path)}}}
    )
    model = whole.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, sorted(model.target_modules)) == (4, 8, ["q_proj", "v_proj"])
    policy = load_policy(model)
    torch.testing.assert_close(policy(packed)["log_probs"], first(packed)["log_probs"])
    trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert sorted(trainable) == sorted(name for name, p in first.named_parameters() if p.requires_grad)
    with policy.adapter_off():
        plain = load_policy(config(llama_folder), trainable=False)
        torch.testing.assert_close(policy(packed)["log_probs"], plain(packed)["log_probs"])


def test_an_adapter_folder_that_is_none_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no adapter_config\.json"):
        load_config({"actor_rollout_ref": {"model": {"lora_adapter_path": str(tmp_path)}}})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16, "peft_type": "LORA"}')
    with pytest.raises(ConfigError, match="has rank 8"):
        load_config({"actor_rollout_ref": {"model": {"lora_adapter_path": str(tmp_path), "lora_rank": 4}}})


def test_excluded_modules_get_no_adapter(llama_folder):
    policy = load_policy(config(llama_folder, lora_rank=4, exclude_modules=["q_proj"]))
    adapted = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert any("k_proj" in name for name in adapted)
    assert not any("q_proj" in name for name in adapted)


def test_target_modules_that_do_not_exist_are_a_config_error(llama_folder):
    with pytest.raises(ConfigError, match="target_modules"):
        load_policy(config(llama_folder, lora_rank=4, target_modules=["nothing_proj"]))


def test_a_tokenizer_larger_than_the_model_is_refused(llama_folder):
    with pytest.raises(DataError, match=r"ids up to 119.*only 97 embeddings"):
        load_policy(config(llama_folder), tokenizer_of_size(120))


def test_a_tokenizer_may_lie_in_a_folder_of_its_own(llama_folder, tmp_path):
    load_tokenizer(llama_folder).save_pretrained(tmp_path / "alone")
    assert not (tmp_path / "alone" / "config.json").exists()
    assert load_tokenizer(tmp_path / "alone").get_vocab() == load_tokenizer(llama_folder).get_vocab()


def test_a_tokenizer_without_padding_pads_with_end_of_sequence(llama_folder):
    tokenizer = load_tokenizer(llama_folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_policy(config(tmp_path / "nowhere"))


def test_a_folder_without_a_model_lists_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(DataError, match=r"no config\.json .*notes\.txt"):
        load_policy(config(tmp_path))


def test_a_file_instead_of_a_folder_is_refused(llama_folder):
    with pytest.raises(DataError, match="is a file"):
        resolve_model_path(llama_folder / "config.json")


def test_a_folder_without_weights_is_refused(tmp_path, llama_folder):
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    with pytest.raises(DataError, match="could not be loaded") as caught:
        load_policy(config(tmp_path))
    assert "safetensors" in str(caught.value)


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path):
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(DataError, match="could not be loaded") as caught:
        load_policy(config(tmp_path))
    assert "causal language model" in caught.value.fix


def test_a_model_that_cannot_be_packed_is_refused(tmp_path):
    make_causal_lm(UNSUPPORTED["bloom (attention of its own)"]()).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="cannot be trained"):
        load_policy(config(tmp_path))


def test_code_that_comes_with_a_model_is_not_run_unasked(tmp_path, llama_folder):
    settings = json.loads((llama_folder / "config.json").read_text())
    settings |= {"model_type": "my_model", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text("raise SystemExit('code was run')")
    with pytest.raises(DataError) as caught:
        load_policy(config(tmp_path))
    assert "trust_remote_code=True" in caught.value.fix


def test_a_hub_that_cannot_be_reached_says_what_to_do():
    with pytest.raises(DataError, match="org/does-not-exist") as caught:
        load_policy(config("org/does-not-exist"))
    assert "give its folder" in caught.value.fix or "give the folder" in caught.value.fix


def test_home_and_environment_variables_are_expanded(llama_folder, monkeypatch):
    monkeypatch.setenv("MY_MODELS", str(llama_folder.parent))
    assert resolve_model_path(f"$MY_MODELS/{llama_folder.name}") == llama_folder
    monkeypatch.setenv("HOME", str(llama_folder.parent))
    assert resolve_model_path(f"~/{llama_folder.name}") == llama_folder


def test_an_embedded_model_is_found_by_name_and_an_unknown_one_lists_those_there_are(llama_folder, monkeypatch):
    monkeypatch.setattr(source, "ASSETS", llama_folder.parent)
    assert resolve_model_path(f"builtin:{llama_folder.name}") == llama_folder
    with pytest.raises(DataError, match=llama_folder.name):
        resolve_model_path("builtin:other")


@pytest.mark.parametrize(("of_the_model", "ends"), [(None, [2]), (2, [2]), (5, [2, 5]), ([7, 2, 5], [2, 5, 7])])
def test_a_response_ends_with_a_token_of_the_tokenizer_or_of_the_generation_config(of_the_model, ends):
    model = make_causal_lm(CONFIGS["llama"]())
    model.generation_config.eos_token_id = of_the_model
    assert end_token_ids(model, tokenizer_of_size(VOCABULARY)) == ends
    model.generation_config = None
    assert end_token_ids(model, tokenizer_of_size(VOCABULARY)) == [2]
