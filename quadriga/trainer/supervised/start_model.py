"""The model that a supervised run starts from: given weights, or random ones of a given shape."""

from __future__ import annotations

from typing import Any

import torch

from quadriga.config.schema_models import ModelConfig
from quadriga.config.supervised_schema import PolicyModelConfig, SFTModelConfig, StartModelConfig
from quadriga.models.attention import register_packed_attention
from quadriga.models.load import check_vocabulary, load_policy, load_tokenizer, load_value_model, override
from quadriga.models.probe import check_packing
from quadriga.models.source import readable_load_errors, resolve_model_path
from quadriga.models.token_model import PolicyModel, ScalarModel


def start_tokenizer(model: StartModelConfig) -> Any:
    source = model.partial_pretrain or getattr(model, "from_config", None) or ""
    return load_tokenizer(model.tokenizer_path or source, model.trust_remote_code)


def start_policy(model: PolicyModelConfig, tokenizer: Any, trainable: bool = True, shards: bool = False) -> PolicyModel:
    """The policy, on the CPU in float32, or with `shards` as an outline. Random weights and adapters come from torch's random state."""
    if isinstance(model, SFTModelConfig) and model.from_config is not None:
        return _random_policy(model, tokenizer)
    config = _model_config(model)
    config.lora_rank, config.lora_alpha = model.lora_rank, model.lora_alpha
    config.target_modules, config.exclude_modules = model.target_modules, model.exclude_modules
    config.lora_adapter_path = model.lora_adapter_path
    return load_policy(config, tokenizer, trainable, shards)


def start_scorer(model: StartModelConfig, tokenizer: Any, shards: bool = False) -> ScalarModel:
    """The trunk of a language model with a score on top that starts at 0."""
    return load_value_model(_model_config(model), tokenizer, shards)


def _model_config(model: StartModelConfig) -> ModelConfig:
    return ModelConfig(
        path=model.partial_pretrain or "",
        trust_remote_code=model.trust_remote_code,
        override_config=model.override_config,
    )


def _random_policy(model: SFTModelConfig, tokenizer: Any) -> PolicyModel:
    """A policy of the shape in `model.from_config`."""
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
