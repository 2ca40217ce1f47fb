"""The LoRA adapter of a checkpoint as a folder of its own, as peft writes and reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from quadriga.checkpoint.checkpoint import Checkpoint
from quadriga.checkpoint.manifest import read_index
from quadriga.checkpoint.shard_reader import Piece, ShardReader
from quadriga.errors import CheckpointError, DataError
from quadriga.models.source import resolve_model_path

TRAINED = ("actor_rollout", "model")
"""Where a checkpoint may have what was trained: of a reinforcement-learning run, of a supervised one."""
WEIGHTS = "adapter_model.safetensors"


def write_adapter(checkpoint: Checkpoint, folder: Path, dtype: str | None) -> int:
    """Write the adapter for `PeftModel.from_pretrained(base_model, folder)`; returns how many parameters it has.

    Raises:
        CheckpointError: the checkpoint has no adapter, or one with numbers that are not finite.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    weights = adapter_weights(checkpoint)
    for name, weight in weights.items():
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"{name} of {checkpoint.path} is not finite", "export an earlier checkpoint")
    if dtype is not None:
        weights = {name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    config = checkpoint.read_state()["config"]
    model = config["actor_rollout_ref"]["model"] if "actor_rollout_ref" in config else config["model"]
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in weights}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes files that only their owner can read
    LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=_base_model(model),
        r=model["lora_rank"],
        lora_alpha=model["lora_alpha"],
        target_modules=sorted(modules),
        inference_mode=True,
    ).save_pretrained(str(folder))
    return sum(weight.numel() for weight in weights.values())


def adapter_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The adapter's tensors, put together from all ranks' files, under the names that peft gives them."""
    role = next((role for role in TRAINED if role in checkpoint.roles), None)
    tensors = read_index(checkpoint.folder(role))["tensors"] if role is not None else {}
    stored = [name for name in tensors if name.startswith("model.") and ".lora_" in name]
    if role is None or not stored:
        raise CheckpointError(
            f"{checkpoint.path} has no LoRA adapter: all weights were trained",
            "export it without --lora apart",
        )
    weights = {}
    with ShardReader(checkpoint.folder(role)) as reader:
        for name in stored:
            shape, dtype = tuple(tensors[name]["shape"]), getattr(torch, tensors[name]["dtype"])
            piece = Piece(name, torch.empty(shape, dtype=dtype), (0,) * len(shape), shape)
            reader.fill(piece, reader.plan(piece, name))
            weights[name.removeprefix("model.causal_lm.").replace(".default.", ".")] = piece.tensor
    return weights


def _base_model(model: dict[str, Any]) -> str:
    """What the adapter was trained on, as a name that others can use; as the run called it where it is not to be found."""
    name = str(model.get("path") or model.get("partial_pretrain") or "")
    try:
        source = resolve_model_path(name)
    except DataError:
        return name
    return str(source) if isinstance(source, str) else os.path.abspath(source)
