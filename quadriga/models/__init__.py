"""Hugging Face models as they are trained: loaded, packed, with log-probs in chunks. Names are loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.models.load import end_token_ids, load_policy, load_reward_model, load_tokenizer, load_value_model

__all__ = ["end_token_ids", "load_policy", "load_reward_model", "load_tokenizer", "load_value_model"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("quadriga.models.load"), name)
    raise AttributeError(f"module 'quadriga.models' has no attribute {name!r}")
