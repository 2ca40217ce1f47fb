"""What the engine must know of a Hugging Face module, and whether it can run it."""

from __future__ import annotations

from typing import Any

import torch

from quadriga.errors import ConfigError
from quadriga.rollout.native.kv_cache import CacheShape

_FIX = "use a decoder-only model with softmax attention, such as Llama, Qwen2, Qwen3, Mistral, Gemma or GPT-2"


def cache_shape(module: Any, block_size: int) -> CacheShape:
    """Geometry of the module's cache. ConfigError if the module's attention is not ours to replace."""
    name = type(module).__name__
    if not getattr(module, "_supports_attention_backend", False):
        raise ConfigError(f"{name} does not call attention through transformers' interface", _FIX)
    if getattr(module, "_is_stateful", False):
        raise ConfigError(f"{name} has layers that carry a state from token to token", _FIX)
    config = module.config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} has an encoder", _FIX)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameter = next(module.parameters())
    return CacheShape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=parameter.dtype,
        device=parameter.device,
    )


def context_length(module: Any) -> int:
    """The longest sequence the model was made for, in tokens."""
    return int(module.config.get_text_config().max_position_embeddings)


def vocab_size(module: Any) -> int:
    """Width of the logits."""
    return int(module.get_output_embeddings().weight.shape[0])


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"
