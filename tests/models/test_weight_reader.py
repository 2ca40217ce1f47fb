"""Weights that are read part by part are those that transformers loads, whatever the files call them."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import _DECODER, CONFIGS, UNSUPPORTED, make_causal_lm
from transformers import AutoConfig, AutoModelForCausalLM

from quadriga.errors import DataError
from quadriga.models.attention import register_packed_attention
from quadriga.models.outline import outline_of, sample_of, with_stand_ins
from quadriga.models.probe import check_packing
from quadriga.models.token_model import PolicyModel
from quadriga.models.weight_reader import WeightReader

EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
FAMILIES = CONFIGS | {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_DECODER, **EXPERTS, head_dim=8, num_experts=6),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_DECODER, **EXPERTS, num_experts=6, shared_expert_intermediate_size=16
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_DECODER, num_experts=6, num_experts_per_tok=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_DECODER | {"num_key_value_heads": 4},
        **EXPERTS,
        **LATENT,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**_DECODER, num_local_experts=6, num_experts_per_tok=2),
}


def outline(folder):
    return outline_of(
        AutoModelForCausalLM,
        AutoConfig.from_pretrained(folder),
        dtype=torch.float32,
        attn_implementation=register_packed_attention(),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_any_rows_of_any_weight_are_those_that_transformers_loads(family, tmp_path):
    make_causal_lm(FAMILIES[family]()).save_pretrained(tmp_path, max_shard_size="20KB")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    blank = outline(tmp_path)
    assert {p.device.type for p in blank.parameters()} == {"meta"}
    reader = WeightReader(blank, tmp_path)
    assert not any(reader.info.values())
    reader.read_buffers()
    expected = dict(whole.named_parameters())
    assert reader.names_of(blank).keys() == expected.keys()
    for name, weight in expected.items():
        for rows in (slice(None), slice(1, 3), slice(0, 0)):
            assert torch.equal(reader.read(name, rows), weight[rows]), (name, rows)
    tables = dict(whole.named_buffers())
    assert all(torch.equal(table, tables[name]) for name, table in blank.named_buffers())
    conversions = [[str(c) for c in model._weight_conversions] for model in (blank, whole)]
    assert conversions[0] == conversions[1], "a checkpoint's export turns them round"


def test_what_does_not_fit_is_named_as_transformers_names_it(tmp_path):
    make_causal_lm(FAMILIES["qwen3_moe"]()).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers, config.intermediate_size, config.vocab_size = 3, 48, 90
    config.num_experts = 5
    settings = {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
    _, expected = AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    info = WeightReader(outline_of(AutoModelForCausalLM, config, dtype=torch.float32), tmp_path).info
    assert info["missing_keys"] == expected["missing_keys"] != set()
    assert {name for name, *_ in info["mismatched_keys"]} == {name for name, *_ in expected["mismatched_keys"]} != set()
    assert info["unexpected_keys"] == expected["unexpected_keys"]


def test_an_outline_takes_no_draw_and_no_memory_to_speak_of():
    before = torch.get_rng_state()
    config = transformers.LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, vocab_size=128256)
    blank = outline_of(AutoModelForCausalLM, config, dtype=torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    assert sum(p.numel() for p in blank.parameters()) > 3e9
    with with_stand_ins(blank):
        assert {p.device.type for p in blank.parameters()} == {"cpu"}
        assert sum(p.untyped_storage().nbytes() for p in blank.parameters()) < 1000
        blank.model.layers[0].requires_grad_(False)
    assert {p.device.type for p in blank.parameters()} == {"meta"}
    assert [p.requires_grad for p in (blank.lm_head.weight, blank.model.layers[0].mlp.up_proj.weight)] == [True, False]


@pytest.mark.parametrize(
    ("family", "changes", "layers"),
    [
        ("llama", {}, 1),
        ("gemma2", {}, 2),
        ("gemma3", {"layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 2, "num_hidden_layers": 7}, 6),
        ("deepseek_v3", {"first_k_dense_replace": 3, "num_hidden_layers": 5}, 4),
    ],
)
def test_a_sample_has_every_kind_of_layer_and_is_small(family, changes, layers):
    config = FAMILIES[family]()
    for key, value in changes.items():
        setattr(config, key, value)
    config.intermediate_size, config.vocab_size = 4096, 50_000
    blank = outline_of(AutoModelForCausalLM, config, attn_implementation=register_packed_attention())
    sample = sample_of(blank)
    assert len(sample.model.layers) == layers
    assert sum(p.numel() for p in sample.parameters()) < 200_000
    check_packing(PolicyModel(sample), family)


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_the_sample_of_a_model_that_cannot_be_packed_shows_it(family):
    blank = outline_of(AutoModelForCausalLM, UNSUPPORTED[family](), attn_implementation=register_packed_attention())
    with pytest.raises(DataError, match="cannot be trained by Quadriga"):
        check_packing(PolicyModel(sample_of(blank)), family)
