"""The model that a supervised run starts from: given weights, or random ones of a given shape."""

from __future__ import annotations

from typing import Any

import torch

from quadriga.config.schema_models import ModelConfig
from quadriga.config.sft_schema import SFTConfig, SFTModelConfig
from quadriga.models.attention import register_packed_attention
from quadriga.models.load import check_vocabulary, load_policy, load_tokenizer, override
from quadriga.models.policy import PolicyModel
from quadriga.models.probe import check_packing
from quadriga.models.source import readable_load_errors, resolve_model_path


def load_start_model(config: SFTConfig) -> tuple[PolicyModel, Any]:
    """The policy, on the CPU in float32, and its tokenizer. The same on every rank: random weights come from the seed."""
    model = config.model
    source = model.partial_pretrain or model.from_config or ""
    tokenizer = load_tokenizer(model.tokenizer_path or source, model.trust_remote_code)
    torch.manual_seed(config.trainer.seed)
    if model.from_config is not None:
        return random_policy(model, tokenizer), tokenizer
    pretrained = ModelConfig(
        path=source,
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
        lora_rank=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=model.target_modules,
    )
    return load_policy(pretrained, tokenizer), tokenizer


def random_policy(model: SFTModelConfig, tokenizer: Any) -> PolicyModel:
    """A policy of the shape in `model.from_config`, with weights drawn from torch's random state."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = resolve_model_path(model.from_config or "")
    with readable_load_errors(folder, "the shape of a causal language model"):
        shape = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        override(shape, model.override_config)
        causal_lm = AutoModelForCausalLM.from_config(
            shape,
            dtype=torch.float32,
            attn_implementation=register_packed_attention(),
            trust_remote_code=model.trust_remote_code,
        )
    check_vocabulary(causal_lm, tokenizer, str(folder))
    policy = PolicyModel(causal_lm)
    check_packing(policy, str(folder))
    return policy.train()
