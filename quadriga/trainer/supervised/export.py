"""Write a trained model as a Hugging Face folder that any other tool can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.engine.sharding import rank
from quadriga.engine.weights import host_state_dict
from quadriga.models.policy import PolicyModel
from quadriga.models.scalar_model import ScalarModel


def export_policy(policy: PolicyModel, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """A causal language model; a LoRA adapter is added to the weights it adapts. All ranks call it; rank 0 writes."""
    weights = host_state_dict(policy, dtype)
    if rank() == 0:
        model = policy.huggingface
        _write(folder, model.config, type(model).__name__, weights, tokenizer, dtype)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)


def export_reward_model(scorer: ScalarModel, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """A sequence classifier with one label, as `load_reward_model` and transformers load it. All ranks call it."""
    from transformers import AutoModelForSequenceClassification

    weights = host_state_dict(scorer, dtype)
    if rank() != 0:
        return
    config = type(scorer.trunk.config).from_dict(scorer.trunk.config.to_dict())
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id  # with which a classifier finds the last token of a padded row
    with torch.device("meta"):
        like = AutoModelForSequenceClassification.from_config(config)
    names = {"trunk.": f"{like.base_model_prefix}.", "head.": "score."}
    renamed = {
        new + name.removeprefix(old): w
        for name, w in weights.items()
        for old, new in names.items()
        if name.startswith(old)
    }
    _write(folder, config, type(like).__name__, renamed, tokenizer, dtype)


def _write(
    folder: Path, config: Any, architecture: str, weights: dict[str, Tensor], tokenizer: Any, dtype: torch.dtype
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shape = type(config).from_dict(config.to_dict())
    shape.dtype = dtype
    shape.architectures = [architecture]
    shape.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file, {"format": "pt"})
    file.chmod(0o644)  # safetensors makes files that only their owner can read
    tokenizer.save_pretrained(folder)
