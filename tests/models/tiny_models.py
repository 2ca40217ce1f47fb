"""Models of every supported family, small enough to be made in milliseconds, with weights large enough to matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from quadriga.models.attention import register_packed_attention

VOCABULARY = 97
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 128} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = _DECODER | {"head_dim": 16, "sliding_window": 3}

CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_DECODER),
    "qwen2": lambda: transformers.Qwen2Config(**_DECODER, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_DECODER, head_dim=16),
    "mistral-window": lambda: transformers.MistralConfig(**_DECODER, sliding_window=3),
    "gemma2": lambda: transformers.Gemma2Config(**_GEMMA, query_pre_attn_scalar=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_GEMMA),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "cohere": lambda: transformers.CohereConfig(**_DECODER, logit_scale=0.25),
    "granite": lambda: transformers.GraniteConfig(**_DECODER, logits_scaling=4.0),
    "mixtral": lambda: transformers.MixtralConfig(**_DECODER, num_local_experts=2, num_experts_per_tok=1),
}
UNSUPPORTED: dict[str, Any] = {
    "mamba (recurrent)": lambda: transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4
    ),
    "bloom (attention of its own)": lambda: transformers.BloomConfig(
        hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY
    ),
    "gpt-oss (attention sinks)": lambda: transformers.GptOssConfig(
        **_DECODER, head_dim=16, num_local_experts=2, num_experts_per_tok=1
    ),
}


def make_causal_lm(config: Any, seed: int = 0) -> Any:
    """A model with packed attention, random weights with standard deviation 0.2 and no dropout."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register_packed_attention())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def ragged_batch(lengths: list[tuple[int, int]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """input_ids, attention_mask `[B, P+R]` and response_mask `[B, R]` of rows with these (prompt, response) lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompt_width, response_width = (max(column) for column in zip(*lengths))
    ids = torch.randint(3, VOCABULARY, (len(lengths), prompt_width + response_width), generator=generator)
    columns = torch.arange(prompt_width + response_width)
    prompts, responses = (torch.tensor(column)[:, None] for column in zip(*lengths))
    mask = (columns >= prompt_width - prompts) & (columns < prompt_width + responses)
    return ids * mask, mask.long(), mask[:, prompt_width:].long()
