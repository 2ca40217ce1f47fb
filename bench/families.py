"""Which parts of which families are fused, and what else depends on the family: the table of docs/gpu.md.

    python bench/families.py

Makes a tiny model of each family and asks the code itself; needs no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from quadriga.config.exactness import EXACT_FAMILIES
from quadriga.models.attention import shares_prompts
from quadriga.models.fused import FusedAttention, FusedMLP, FusedRMSNorm, GemmaRMSNorm, fuse

_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", {}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", _EXPERTS),
    "Gemma": ("GemmaConfig", {}),
    "Gemma 2": ("Gemma2Config", {"query_pre_attn_scalar": 16}),
    "Gemma 3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 16}),
    "OLMo 2": ("Olmo2Config", {}),
    "Phi": ("PhiConfig", {}),
    "Phi 3": ("Phi3Config", {"pad_token_id": 0}),
}
"""Name → class of its config in transformers, and what that needs besides the shape."""
PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "norms": (FusedRMSNorm, GemmaRMSNorm),
    "MLP": (FusedMLP,),
    "projections and rotary": (FusedAttention,),
}


def fused_parts(family: str, device: str) -> set[str]:
    """The keys of `PARTS` that `fuse` replaces for a device of that type."""
    name, more = FAMILIES[family]
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**_SHAPE, **more), dtype=torch.float32)
    fuse(model, torch.device(device))
    return {part for part, kinds in PARTS.items() if any(isinstance(m, kinds) for m in model.modules())}


def row_of(family: str) -> list[str]:
    name, more = FAMILIES[family]
    config = getattr(transformers, name)(**_SHAPE, **more)
    cells = [_words(fused_parts(family, device)) for device in ("cuda", "cpu")]
    return [
        family,
        *cells,
        "kernels" if shares_prompts(config) else "plain",
        "yes" if config.model_type in EXACT_FAMILIES else "no",
    ]


def _words(parts: set[str]) -> str:
    return "all" if parts == set(PARTS) else ", ".join(p for p in PARTS if p in parts) or "none"


def table() -> str:
    """The table in Markdown."""
    head = ["family", "fused on a GPU", "fused on a CPU", "attention on a GPU", "`exact`"]
    rows = [head, ["---"] * len(head), *(row_of(family) for family in FAMILIES)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace(
        "| --- | --- | --- | --- | --- |", "|---|---|---|---|---|"
    )


if __name__ == "__main__":
    print(table(), end="")
