"""Hugging Face models as they are trained: loaded, packed, with log-probs in chunks. Names are loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.models.load import end_token_ids, load_policy, load_reward_model, load_tokenizer, load_value_model

__all__, __getattr__ = lazy_names(__name__, __file__)
