"""Size and shape of a model from its folder, without loading it: safetensors headers and config.json only."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parents[1] / "assets"
BUILTIN = "builtin:"
LARGEST_HEADER = 100 << 20
"""Bytes; a safetensors header that claims more is damaged."""


@dataclass(frozen=True)
class ModelShape:
    """What a memory estimate needs to know. Widths are in elements."""

    parameters: int
    layers: int
    hidden: int
    ffn: int
    query_width: int
    kv_width: int
    """Width of the keys (and of the values) of one token in one layer."""
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer, norms and biases left out."""
        return self.hidden * (2 * self.query_width + 2 * self.kv_width + 3 * self.ffn)

    def lora_parameters(self, rank: int) -> int:
        """Weights of a LoRA adapter of this rank on every linear map of every layer."""
        attention = 2 * (self.hidden + self.query_width) + 2 * (self.hidden + self.kv_width)
        return rank * self.layers * (attention + 3 * (self.hidden + self.ffn))


def find_model_folder(name: str) -> Path | None:
    """The local folder of a model: a path, a built-in one, or a hub name that lies in the local hub cache."""
    if name.startswith(BUILTIN):
        candidates = [ASSETS / name.removeprefix(BUILTIN)]
    else:
        candidates = [Path(os.path.expandvars(name)).expanduser(), *_cached_snapshots(name)]
    return next((folder for folder in candidates if (folder / "config.json").is_file()), None)


def _cached_snapshots(name: str) -> list[Path]:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    head = cache / "refs" / "main"
    return [cache / "snapshots" / head.read_text(encoding="ascii", errors="replace").strip()] if head.is_file() else []


def read_model_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`.

    Raises:
        ValueError: the folder's files do not describe a decoder; says which part is missing.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from None
    config = {**config, **config.get("text_config", {})}
    hidden, layers = _number(config, "hidden_size", "n_embd"), _number(config, "num_hidden_layers", "n_layer")
    heads, vocab = _number(config, "num_attention_heads", "n_head"), _number(config, "vocab_size")
    head_width = config.get("head_dim") or hidden // heads
    shape = ModelShape(
        parameters=0,
        layers=layers,
        hidden=hidden,
        ffn=config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        query_width=heads * head_width,
        kv_width=(config.get("num_key_value_heads") or heads) * head_width,
        vocab=vocab,
    )
    files = sorted(folder.glob("*.safetensors"))
    if files:
        parameters = sum(map(count_parameters, files))
    else:
        embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
        parameters = layers * shape.layer_parameters + embeddings
    return ModelShape(**{**vars(shape), "parameters": parameters})


def read_heads(folder: Path | None) -> tuple[int, int] | None:
    """Attention heads of the model in `folder`, and those of keys and values; None where that cannot be told."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else {}
        config = {**config, **config.get("text_config", {})}
        heads = _number(config, "num_attention_heads", "n_head")
    except (OSError, ValueError):
        return None
    return heads, config.get("num_key_value_heads") or heads


def _number(config: dict[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] > 0:
            return config[name]
    raise ValueError(f"config.json has no {' or '.join(names)}")


def count_parameters(file: Path) -> int:
    """Number of values in a safetensors file, from its header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"{file} is not a safetensors file")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise ValueError(f"{file} is not a safetensors file") from None
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
