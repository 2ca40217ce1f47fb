"""The workers of a run: thin, they compose the other rooms. Loaded when first named: they bring torch with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
    from quadriga.workers.critic import CriticWorker
    from quadriga.workers.reward_model import RewardModelWorker
    from quadriga.workers.rollout import RolloutWorker
    from quadriga.workers.teacher import TeacherWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker", "RolloutWorker", "TeacherWorker"]

_LAZY = {
    "ActorRolloutRefWorker": "actor_rollout_ref",
    "CriticWorker": "critic",
    "RewardModelWorker": "reward_model",
    "RolloutWorker": "rollout",
    "TeacherWorker": "teacher",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"quadriga.workers.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'quadriga.workers' has no attribute {name!r}")
