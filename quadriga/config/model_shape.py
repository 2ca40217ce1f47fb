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
USUAL_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
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
    config = read_description(folder)
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    heads, vocab = _number(config, "num_attention_heads"), _number(config, "vocab_size")
    head_width = config.get("head_dim") or hidden // heads
    shape = ModelShape(
        parameters=0,
        layers=layers,
        hidden=hidden,
        ffn=config.get("intermediate_size") or 4 * hidden,
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


def read_description(folder: Path) -> dict[str, Any]:
    """config.json of the model in `folder`: that of its text part, under the names that most families use.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from None
    return {USUAL_NAMES.get(name, name): value for name, value in config.items()}


def describe(path: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The description of the model of that name or folder, with `override_config`; empty where it is not on this machine, or
    cannot be read: whoever loads the model says what is wrong with it."""
    folder = find_model_folder(path)
    try:
        return {} if folder is None else {**read_description(folder), **(changes or {})}
    except ValueError:
        return {}


def _number(config: dict[str, Any], name: str) -> int:
    if isinstance(config.get(name), int) and config[name] > 0:
        return config[name]
    raise ValueError(f"config.json has no {name}")


def count_parameters(file: Path) -> int:
    """Number of values in a safetensors file, from its header."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > LARGEST_HEADER:
                raise ValueError(f"{file} is not a safetensors file")
            header = json.loads(stream.read(length))
        return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file} is not a safetensors file") from None
