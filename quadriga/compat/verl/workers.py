"""`verl.workers.fsdp_workers` and `verl.workers.engine_workers`: the workers of a run, for recipes that say themselves which role
has which."""

from __future__ import annotations

from typing import Any

from quadriga.config.needs import need_sum_pi_squared
from quadriga.controller.dispatch import Dispatch, register
from quadriga.protocol import DataProto
from quadriga.workers import ActorRolloutRefWorker as _ActorRolloutRefWorker
from quadriga.workers import CriticWorker, RewardModelWorker
from quadriga.workers.updates import micro_batch_limits

__all__ = [
    "ActorRolloutRefWorker",
    "AsyncActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
    "plain_class",
]


class ActorRolloutRefWorker(_ActorRolloutRefWorker):
    """The policy's worker, which also tells the entropy beside log-probs, as verl's does."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob_and_entropy(self, data: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` `[B, R]` by the actor as it is now; `sum_pi_squared` where an estimator takes it."""
        rollout, squares = self.policy_config.rollout, need_sum_pi_squared(self.config)
        limits = micro_batch_limits(rollout, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
        told = self.engine.token_statistics(
            data, rollout.temperature, with_entropy=True, with_sum_pi_squared=squares, **limits
        )
        columns = {"old_log_probs": told["log_probs"], "entropys": told["entropy"]}
        if squares:
            columns["sum_pi_squared"] = told["sum_pi_squared"]
        return DataProto.from_dict(tensors=columns)


AsyncActorRolloutRefWorker = ActorRolloutRefWorker


def plain_class(worker_class: Any) -> Any:
    """The class behind one that `ray.remote` made; the policy's with what recipes ask of it."""
    plain = getattr(worker_class, "__ray_actor_class__", worker_class)
    return ActorRolloutRefWorker if plain is _ActorRolloutRefWorker else plain
