"""Models that vLLM can compute on a CPU, where the width of a head must be one of those its kernels know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def arithmetic_with_wide_heads(folder: Path, head_dim: int = 32) -> Path:
    """The embedded model as the very same function with wider heads: zeros fill them up, in queries, keys, values and outputs.

    Rotation turns the pairs (i, i + head_dim / 2): so each half of a head is filled up by itself, and the base of the
    frequencies is changed so that every pair turns as fast as before. Training keeps the zeros: their gradients are 0.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quadriga.models.source import resolve_model_path

    source = resolve_model_path("builtin:arithmetic")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, narrow = model.config, model.config.head_dim
    state = model.state_dict()
    for name, weight in state.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name] = _wider(weight, narrow, head_dim)
        elif name.endswith("o_proj.weight"):
            state[name] = _wider(weight.T, narrow, head_dim).T.contiguous()
        if name.endswith("q_proj.weight"):
            state[name] = state[name] * (head_dim / narrow) ** 0.5  # scores are divided by the root of the width
    config.head_dim = head_dim
    config.rope_parameters["rope_theta"] **= head_dim / narrow
    config.dtype = torch.float32
    wide = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wide.load_state_dict(state)
    wide.generation_config = model.generation_config
    wide.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def _wider(weight: torch.Tensor, narrow: int, wide: int) -> torch.Tensor:
    """`[heads * narrow, W]` → `[heads * wide, W]`, zeros behind each half of a head."""
    halves = weight.view(-1, 2, narrow // 2, weight.shape[1])
    filled = torch.zeros(halves.shape[0], 2, wide // 2, weight.shape[1])
    filled[:, :, : narrow // 2] = halves
    return filled.flatten(0, 2)


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """A random model whose distributions are far from uniform, with biases nowhere and a vocabulary that vLLM pads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 331,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**shape | changes)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(4 if "embed" in name else 2)
    return model


def word_tokenizer(words: int = 331) -> Any:
    """A tokenizer whose token n is the text `wordn,`."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"word{n},": n for n in range(words)}, unk_token="word0,"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
