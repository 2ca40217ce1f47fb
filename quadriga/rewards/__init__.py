"""Rewards: scorers, the pool of killable scoring processes, and the managers between them and the trainer.

Names are loaded on first use: a scoring process imports this package too, and must not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.rewards.functions import RewardFunction, reward_function
    from quadriga.rewards.managers import (
        BatchRewardManager,
        DAPORewardManager,
        NaiveRewardManager,
        RewardManager,
        build_manager,
        check_sources,
        check_truths,
        has_scorers,
        load_reward_manager,
        open_pool,
        register_manager,
    )
    from quadriga.rewards.pool import RewardPool
    from quadriga.rewards.result import RewardResult, RewardSample, metrics
    from quadriga.rewards.scorers import known_sources, register_scorer

_LAZY = {
    "BatchRewardManager": "managers",
    "DAPORewardManager": "managers",
    "NaiveRewardManager": "managers",
    "RewardFunction": "functions",
    "RewardManager": "managers",
    "RewardPool": "pool",
    "RewardResult": "result",
    "RewardSample": "result",
    "build_manager": "managers",
    "check_sources": "managers",
    "check_truths": "managers",
    "has_scorers": "managers",
    "known_sources": "scorers",
    "load_reward_manager": "managers",
    "metrics": "result",
    "open_pool": "managers",
    "register_manager": "managers",
    "register_scorer": "scorers",
    "reward_function": "functions",
}

__all__ = [
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "RewardFunction",
    "RewardManager",
    "RewardPool",
    "RewardResult",
    "RewardSample",
    "build_manager",
    "check_sources",
    "check_truths",
    "has_scorers",
    "known_sources",
    "load_reward_manager",
    "metrics",
    "open_pool",
    "register_manager",
    "register_scorer",
    "reward_function",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"quadriga.rewards.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'quadriga.rewards' has no attribute {name!r}")
