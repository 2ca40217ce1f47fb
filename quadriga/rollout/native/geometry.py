"""What the engine must know of a Hugging Face module and of the memory it may use."""

from __future__ import annotations

from typing import Any

import torch

from quadriga.accelerator import free_memory
from quadriga.errors import ConfigError
from quadriga.host import usable_memory
from quadriga.rollout.native.kv_cache import CacheShape

UNSUPPORTED_FIX = (
    "use a decoder-only model with softmax attention, such as Llama, Qwen2, Qwen3, Mistral, Gemma or GPT-2"
)


def cache_shape(module: Any, block_size: int) -> CacheShape:
    """Geometry of the module's cache. ConfigError if its attention is not of a kind the engine computes."""
    config = module.config.get_text_config()
    if reason := _unsupported(module, config):
        raise ConfigError(f"the native engine cannot run {type(module).__name__}: {reason}", UNSUPPORTED_FIX)
    heads = config.num_attention_heads
    parameter = next(module.parameters())
    return CacheShape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        block_size=block_size,
        dtype=parameter.dtype,
        device=parameter.device,
    )


def _unsupported(module: Any, config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if getattr(module, "_is_stateful", False):
        return "its layers carry a state from token to token"
    if not getattr(module, "_supports_attention_backend", False):
        return "it does not call attention through transformers' interface"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    rope = getattr(config, "rope_parameters", None) or {}
    dynamic = [
        r for r in (rope, *rope.values()) if isinstance(r, dict) and r.get("rope_type") in ("dynamic", "longrope")
    ]
    if dynamic:
        return f"its {dynamic[0]['rope_type']} positions depend on the other sequences of a batch"
    return None


def context_length(module: Any) -> int:
    """The longest sequence the model was made for, in tokens."""
    return int(module.config.get_text_config().max_position_embeddings)


def vocab_size(module: Any) -> int:
    """Width of the logits."""
    sharded = getattr(module, "sharded", None)
    return int(module.get_output_embeddings().weight.shape[0]) if sharded is None else sharded.vocab_size


def fitting_blocks(shape: CacheShape, wanted: int, memory_fraction: float, sharded: Any = None) -> int:
    """`wanted` blocks, or as many as fit into that share of the free memory. ConfigError if not one does.

    Args:
        sharded: of a module that is shared out over a set, whose members then agree.
    """
    free = _free_bytes(shape.device)
    blocks = min(wanted, int(memory_fraction * free) // shape.bytes_per_block)
    if sharded is not None:  # all members of a set schedule alike, so they have equally many
        blocks = sharded.ranks.smallest(blocks, shape.device)
    if blocks < 1:
        raise ConfigError(
            f"no block of {shape.block_size} tokens ({shape.bytes_per_block} bytes) fits into the KV cache: "
            f"{free >> 20} MiB are free, {wanted} blocks were wanted",
            "raise actor_rollout_ref.rollout.gpu_memory_utilization (memory_fraction), or kv_cache_tokens if it is set",
        )
    return blocks


def _free_bytes(device: torch.device) -> int:
    """Memory that could be allocated on `device` now; what the system caches of files counts as free."""
    return usable_memory()[1] if device.type == "cpu" else free_memory(device)
