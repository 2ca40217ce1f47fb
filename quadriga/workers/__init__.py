"""The workers of a run: thin, they compose the other rooms."""

from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.critic import CriticWorker
from quadriga.workers.reward_model import RewardModelWorker

__all__ = ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
