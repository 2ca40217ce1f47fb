"""Write a policy as a Hugging Face folder that any other tool can load."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from quadriga.engine.sharding import rank
from quadriga.engine.weights import host_state_dict
from quadriga.models.policy import PolicyModel


def export_policy(policy: PolicyModel, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json, model.safetensors and the tokenizer. All ranks must call it; rank 0 writes.

    A LoRA adapter is added to the weights it adapts. The folder appears complete or not at all.
    """
    from safetensors.torch import save_file

    weights = host_state_dict(policy, dtype)
    if rank() != 0:
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    model = policy.huggingface
    shape = type(model.config).from_dict(model.config.to_dict())
    shape.dtype = dtype
    shape.architectures = [type(model).__name__]
    shape.save_pretrained(unfinished)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(unfinished)
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        unfinished / "model.safetensors",
        {"format": "pt"},
    )
    tokenizer.save_pretrained(unfinished)
    (unfinished / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
