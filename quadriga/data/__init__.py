"""The data path: files -> rows -> tokens -> batches. Names are loaded when first used, so importing this is cheap."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.data.collate import collate_pairs, collate_prompts, collate_sft
    from quadriga.data.factory import (
        create_preference_dataset,
        create_rl_dataset,
        create_rl_loader,
        create_rl_sampler,
        create_sft_dataset,
        validation_batches,
    )
    from quadriga.data.loader import BatchLoader
    from quadriga.data.preference_dataset import PreferenceDataset
    from quadriga.data.prep.arithmetic import generate_arithmetic
    from quadriga.data.rl_dataset import RLDataset
    from quadriga.data.sampler import ResumableSampler
    from quadriga.data.sft_dataset import SFTDataset

_LAZY = {
    "BatchLoader": "loader",
    "PreferenceDataset": "preference_dataset",
    "RLDataset": "rl_dataset",
    "ResumableSampler": "sampler",
    "SFTDataset": "sft_dataset",
    "collate_pairs": "collate",
    "collate_prompts": "collate",
    "collate_sft": "collate",
    "create_preference_dataset": "factory",
    "create_rl_dataset": "factory",
    "create_rl_loader": "factory",
    "create_rl_sampler": "factory",
    "create_sft_dataset": "factory",
    "generate_arithmetic": "prep.arithmetic",
    "validation_batches": "factory",
}

__all__ = [
    "BatchLoader",
    "PreferenceDataset",
    "RLDataset",
    "ResumableSampler",
    "SFTDataset",
    "collate_pairs",
    "collate_prompts",
    "collate_sft",
    "create_preference_dataset",
    "create_rl_dataset",
    "create_rl_loader",
    "create_rl_sampler",
    "create_sft_dataset",
    "generate_arithmetic",
    "validation_batches",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"quadriga.data.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'quadriga.data' has no attribute {name!r}")
