"""Tiny random models of several families, built from configs, and what a test compares with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 331
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_GEMMA: dict[str, Any] = {**_SHAPE, "head_dim": 12, "sliding_window": 24}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16),
    "mistral_window": lambda: MistralConfig(**_SHAPE, sliding_window=24),
    "gemma": lambda: GemmaConfig(**_SHAPE, head_dim=12),
    "gemma2_softcap_window": lambda: Gemma2Config(**_GEMMA, query_pre_attn_scalar=12, attn_logit_softcapping=2.0),
    "gemma3_window": lambda: Gemma3TextConfig(
        **_GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SHAPE, head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1]
    ),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "phi3": lambda: Phi3Config(**_SHAPE, pad_token_id=0),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=256, attn_pdrop=0.1, resid_pdrop=0.1
    ),
}


def tiny_model(family: str = "qwen2", seed: int = 0) -> Any:
    """A model with weights large enough that its distributions are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(4 if "embed" in name or "wte" in name else 2)
    return model


@torch.no_grad()
def own_log_probs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of `response` after `prompt` by the model's own forward pass over the whole sequence."""
    training, before = model.training, model.config._attn_implementation
    model.eval()
    model.config._attn_implementation = "eager"
    logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    model.config._attn_implementation = before
    model.train(training)
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
