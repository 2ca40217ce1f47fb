"""The data path: files -> rows -> tokens -> batches. Names are loaded when first used, so importing this is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.data.example_dataset import PreferenceDataset, SFTDataset
    from quadriga.data.factory import (
        create_preference_dataset,
        create_rl_dataset,
        create_rl_loader,
        create_rl_sampler,
        create_sft_dataset,
        validation_batches,
    )
    from quadriga.data.loader import BatchLoader, collate_pairs, collate_prompts, collate_sft
    from quadriga.data.prep.arithmetic import generate_arithmetic
    from quadriga.data.rl_dataset import RLDataset
    from quadriga.data.sampler import ResumableSampler

__all__, __getattr__ = lazy_names(__name__, __file__)
