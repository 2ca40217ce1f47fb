"""The value model in a slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quadriga.controller.dispatch import Dispatch, register
from quadriga.engine import TrainingEngine
from quadriga.engine.sharding import is_sharded
from quadriga.protocol import DataProto
from quadriga.workers.base import LearningWorker, named
from quadriga.workers.losses import critic_loss
from quadriga.workers.updates import local_world_size, mean_of, micro_batch_limits, mini_batches, recomputes_activations


class CriticWorker(LearningWorker):
    """The value model: the policy's architecture with a scalar head."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        from quadriga.models.load import load_value_model

        critic = self.config.critic
        self.optimiser = critic.optim.name
        self.engine = TrainingEngine(
            load_value_model(critic.model, shards=is_sharded(self.device_name)),
            optim=critic.optim,
            fsdp=critic.fsdp_config,
            grad_clip=critic.grad_clip,
            total_steps=total_steps,
            device=self.device_name,
            gradient_checkpointing=recomputes_activations(self.config, "critic", self.device_name, local_world_size()),
            sequence_parallel=critic.ulysses_sequence_parallel_size,
            dump_dir=Path(self.config.trainer.default_local_dir) / "dumps",
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` `[B, R]`: what the critic expects before each response token."""
        return DataProto.from_dict(tensors={"values": self.engine.values(data, **self._limits())})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        """`ppo_epochs` passes of mini-batches, one optimiser step each; then one step of the schedule."""
        critic, meta = self.config.critic, data.meta_info
        parts = mini_batches(
            data, meta["mini_batches"], critic.ppo_epochs, critic.shuffle, self.config.data.seed + meta["step"]
        )
        loss_fn = critic_loss(
            critic, self.config.actor_rollout_ref.actor.loss_scale_factor or self.config.data.max_response_length
        )
        by_update = [self.engine.train_mini_batch(part, loss_fn, **self._limits()) for part in parts]
        self.engine.end_step()
        return DataProto(meta_info={"metrics": named(mean_of(by_update), "critic")})

    def _limits(self) -> dict[str, Any]:
        return micro_batch_limits(self.config.critic, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
