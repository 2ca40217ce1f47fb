"""Rewards: scorers, the pool of killable scoring processes, and the managers between them and the trainer.

Names are loaded on first use: a scoring process imports this package too, and must not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

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

__all__, __getattr__ = lazy_names(__name__, __file__)
