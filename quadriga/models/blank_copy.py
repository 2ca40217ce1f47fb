"""A second module of the same model, to be filled with weights: what generates where the trainer's module cannot."""

from __future__ import annotations

import copy
from typing import Any

import torch


def blank_copy(module: Any, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A Hugging Face model like `module` on `device`, in `dtype`, frozen. Its weights are random: copy the real ones in.

    It is made from the config, so adapters and sharding of `module` do not matter. Tables such as those of the rotary
    embedding stay in float32 and are those of `module`: computed anew on another device they could differ in the last bit,
    and far positions would be turned otherwise than in training.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):  # what is drawn later does not depend on it
        blank = type(module)._from_config(copy.deepcopy(module.config), dtype=dtype)
    tables = dict(module.named_buffers())
    for name, table in blank.named_buffers():
        table.copy_(tables[name])
    blank.generation_config = module.generation_config
    return blank.requires_grad_(False).eval()


def outline(module: Any) -> Any:
    """A Hugging Face model like `module` without memory: its class, configuration, names and shapes."""
    with torch.device("meta"):
        bare = type(module)._from_config(copy.deepcopy(module.config))
    bare.generation_config = module.generation_config
    return bare
