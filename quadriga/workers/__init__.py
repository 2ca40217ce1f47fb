"""The workers of a run: thin, they compose the other rooms. Loaded when first named: they bring torch with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
    from quadriga.workers.critic import CriticWorker
    from quadriga.workers.reward_model import RewardModelWorker
    from quadriga.workers.rollout import RolloutWorker
    from quadriga.workers.teacher import TeacherWorker

__all__, __getattr__ = lazy_names(__name__, __file__)
