"""Size and shape of a model from its folder, without loading it: safetensors headers and config.json only."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parents[1] / "assets"
BUILTIN = "builtin:"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What families call the number of experts of a layer in config.json."""
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
USUAL_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
LARGEST_HEADER = 100 << 20
"""Bytes; a safetensors header that claims more is damaged."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer of a mixture. Widths are in elements."""

    count: int
    per_token: int
    width: int
    shared_width: int
    """Of the experts that every token goes through."""
    layers: int
    """How many layers have experts; the others are dense."""


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
    kv_heads: int
    vocab: int
    layer_parameters: int
    """Of the largest decoder layer, with all its experts."""
    decoder_parameters: int
    """Of all layers; the rest is embeddings, output head and norm."""
    experts: Experts | None = None
    family: str = ""

    @property
    def rest(self) -> int:
        """Weights that belong to no layer."""
        return max(0, self.parameters - self.decoder_parameters)

    @property
    def active_width(self) -> int:
        """Width of the MLPs that one token goes through in a layer."""
        if self.experts is None:
            return self.ffn
        return self.experts.per_token * self.experts.width + self.experts.shared_width

    @property
    def largest_tensor(self) -> int:
        """Weights of the largest tensor of a layer."""
        if self.experts is None:
            return self.hidden * max(self.ffn, self.query_width)
        return self.experts.count * 2 * self.hidden * self.experts.width

    def lora_parameters(self, rank: int) -> int:
        """Weights of a LoRA adapter of this rank on every linear map of every layer; stacks of experts are none."""
        attention = 2 * (self.hidden + self.query_width) + 2 * (self.hidden + self.kv_width)
        mixed = 0 if self.experts is None else self.experts.layers
        shared = 0 if self.experts is None or not self.experts.shared_width else self.hidden + self.experts.shared_width
        mlps = (self.layers - mixed) * 3 * (self.hidden + self.ffn) + mixed * 3 * shared
        return rank * (self.layers * attention + mlps)


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
    kv_heads = config.get("num_key_value_heads") or heads
    head_width = config.get("head_dim") or hidden // heads
    ffn, experts = config.get("intermediate_size") or 4 * hidden, _experts(config, layers)
    query_width, kv_width = heads * head_width, kv_heads * head_width
    attention = _latent_attention(config, hidden, heads) or hidden * (2 * query_width + 2 * kv_width)
    sizes = dict.fromkeys(range(layers), attention + 3 * hidden * ffn)
    if experts is not None:
        mixture = hidden * (experts.count * (3 * experts.width + 1) + 3 * experts.shared_width)
        sizes |= dict.fromkeys(range(layers - experts.layers, layers), attention + mixture)
    parameters = sum(sizes.values()) + vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    if files := sorted(folder.glob("*.safetensors")):
        counts: Counter[str] = Counter()
        for file in files:
            counts.update(count_parameters(file))
        if config.get("tie_word_embeddings"):
            del counts["lm_head.weight"]  # the embedding once more
        parameters = counts.total()
        stored = _by_layer(counts)
        if len(stored) == layers:
            sizes = stored
    return ModelShape(
        parameters=parameters,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        query_width=query_width,
        kv_width=kv_width,
        kv_heads=kv_heads,
        vocab=vocab,
        layer_parameters=max(sizes.values()),
        decoder_parameters=sum(sizes.values()),
        experts=experts,
        family=str(config.get("model_type") or ""),
    )


def count_experts(described: dict[str, Any]) -> int:
    """Experts of a layer that tokens are routed to, by a model's config.json; 0 for a dense model."""
    counts = [described.get(name) for name in EXPERT_COUNTS]
    return next((count for count in counts if isinstance(count, int) and count > 1), 0)


def _experts(config: dict[str, Any], layers: int) -> Experts | None:
    if not (count := count_experts(config)):
        return None
    width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    dense = set(range(config.get("first_k_dense_replace") or 0)) | set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    mixed = [n for n in range(layers) if n not in dense and (n + 1) % step == 0]
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    per_token = next((config[name] for name in PER_TOKEN if isinstance(config.get(name), int)), 1)
    return Experts(count, per_token, width, shared, len(mixed))


def _latent_attention(config: dict[str, Any], hidden: int, heads: int) -> int:
    """Weights of attention whose keys and values come from a narrow state; 0 for any other."""
    narrow, turned = config.get("kv_lora_rank") or 0, config.get("qk_rope_head_dim") or 0
    if not narrow:
        return 0
    plain, value = config.get("qk_nope_head_dim") or 0, config.get("v_head_dim") or 0
    queries = heads * (plain + turned)
    into = hidden * queries if not (rank := config.get("q_lora_rank")) else rank * (hidden + queries)
    return into + hidden * (narrow + turned) + narrow * heads * (plain + value) + heads * value * hidden


def _by_layer(counts: Counter[str]) -> dict[int, int]:
    """Weights of each decoder layer, by the numbers in the names of its tensors."""
    sizes: Counter[int] = Counter()
    for name, count in counts.items():
        if number := _LAYER.search(name):
            sizes[int(number[1])] += count
    return dict(sizes)


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


def count_parameters(file: Path) -> dict[str, int]:
    """Number of values of each tensor in a safetensors file, from its header."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > LARGEST_HEADER:
                raise ValueError(f"{file} is not a safetensors file")
            header = json.loads(stream.read(length))
        return {name: prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file} is not a safetensors file") from None
