"""The models of the H200 benchmarks: shapes with random weights, and the machine's two ceilings."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PreTrainedConfig, Qwen2Config, Qwen3Config

MEMORY_BANDWIDTH = 4.3e12
"""Bytes a second of a large device-to-device copy on this machine, read and written."""
MATRIX_RATE = 989e12
"""Dense bfloat16 operations a second by the data sheet; 770 to 800e12 were measured with large products."""

_QWEN = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "1.5B": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
    },
}
FAMILIES = {"gemma2": Gemma2Config, "qwen3": Qwen3Config}
"""Other families with the 0.5B shape."""


def config_of(shape: str) -> PreTrainedConfig:
    """A key of `SHAPES`, or of `FAMILIES`."""
    if shape in FAMILIES:
        return FAMILIES[shape](**_QWEN, **SHAPES["0.5B"], head_dim=64)
    return Qwen2Config(**_QWEN, **SHAPES[shape])


def make_model(shape: str, dtype: torch.dtype, device: str = "cuda", **options: Any) -> Any:
    """The shape with random weights, made on `device`."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype, **options).eval()


def parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def train_flops(count: int, config: Any, lengths: list[int]) -> float:
    """6 operations a weight and token, and causal attention (12 a layer, head dimension and pair of tokens that see each
    other): forward and backward, without what is computed twice."""
    attention = sum(12 * config.num_hidden_layers * config.hidden_size * n * n / 2 for n in lengths)
    return 6 * count * sum(lengths) + attention
