"""The policy in a slot."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from quadriga.config.placement import placement_of
from quadriga.config.schema import Config
from quadriga.controller.dispatch import Dispatch, register
from quadriga.protocol import DataProto
from quadriga.workers.base import LearningWorker, named
from quadriga.workers.losses import actor_loss
from quadriga.workers.rollout import GeneratingWorker
from quadriga.workers.updates import mean_of, micro_batch_limits, mini_batches
from quadriga.workers.weight_push import PushedWeights, push


class ActorRolloutRefWorker(GeneratingWorker, LearningWorker):
    """The policy: it is trained (actor), it generates (rollout), and its frozen start is the reference (ref).

    Args:
        config: the whole, checked configuration.
        role: `actor_rollout`, or `ref` for a frozen copy that only gives log-probs.
    """

    def __init__(self, config: Config, role: str) -> None:
        super().__init__(config, role)
        self.is_actor = role != "ref"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        """Load the model and, for the actor, make its optimiser and, unless that has its own pool, its rollout engine."""
        from quadriga.engine import TrainingEngine
        from quadriga.models.blank_copy import blank_copy
        from quadriga.models.load import load_policy

        cfg = self.policy_config
        self.tokenizer = self.load_tokenizer()
        policy = load_policy(cfg.model, self.tokenizer, trainable=self.is_actor)
        self.engine = TrainingEngine(
            policy,
            optim=cfg.actor.optim if self.is_actor else None,
            fsdp=cfg.actor.fsdp_config if self.is_actor else None,
            grad_clip=cfg.actor.grad_clip,
            total_steps=total_steps,
            device=self.device_name,
            gradient_checkpointing=self.is_actor and cfg.model.enable_gradient_checkpointing,
            dump_dir=Path(self.config.trainer.default_local_dir) / "dumps",
        )
        if self.is_actor and placement_of(self.config).generator == self.role:
            # One process on a CPU generates with the training module itself; shards, and float32 weights of a model that
            # computes in bfloat16, need a module of their own.
            on_cpu = self.device_name == "cpu"
            self.shares_weights = on_cpu and self.world_size == 1 and not cfg.actor.fsdp_config.param_offload
            if self.shares_weights:
                module = self.engine.model.huggingface
            elif on_cpu:
                module = self.load_whole_policy()
            else:
                module = blank_copy(self.engine.model.huggingface, self.device_name)
            self.start_rollout(module, self.tokenizer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> Any:
        """Hand the trained weights to the rollout engine; its echo says which version it holds."""
        return self.rollout.update_weights(version, None if self.shares_weights else self.engine.full_weights())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def push_weights(self, version: int) -> PushedWeights | None:
        """Put the trained weights where engines in other pools find them; None on all ranks but the first."""
        weights = self.engine.full_weights(self.rollout_dtype)
        if self.rank == 0:
            return push(version, weights)
        deque(weights, maxlen=0)  # gathering takes all ranks
        return None

    # ---- actor and reference ----

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """`old_log_probs` `[B, R]` by the actor as it is now."""
        rollout = self.policy_config.rollout
        limits = micro_batch_limits(rollout, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
        log_probs, _ = self.engine.log_probs(data, rollout.temperature, **limits)
        return DataProto.from_dict(tensors={"old_log_probs": log_probs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` `[B, R]` by the policy's frozen start: this worker's model, or the actor without its adapter."""
        ref = self.policy_config.ref
        limits = micro_batch_limits(ref, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
        with self.engine.adapter_off() if self.is_actor else nullcontext():
            log_probs, _ = self.engine.log_probs(data, self.policy_config.rollout.temperature, **limits)
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        """`ppo_epochs` passes of mini-batches, one optimiser step each; then one step of the schedule."""
        actor = self.policy_config.actor
        limits = micro_batch_limits(actor, "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu")
        parts = mini_batches(
            data,
            data.meta_info["mini_batches"],
            actor.ppo_epochs,
            actor.shuffle,
            self.config.data.seed + data.meta_info["step"],
        )
        loss_fn, told = actor_loss(actor), []
        for part in parts:
            told.append(
                self.engine.train_mini_batch(
                    part, loss_fn, temperature=self.policy_config.rollout.temperature, with_entropy=True, **limits
                )
            )
        self.engine.end_step()
        return DataProto(meta_info={"metrics": named(mean_of(told), "actor")})

    def checkpoint_parts(self) -> dict[str, Any]:
        """The engine's state, and on the first rank the policy as a Hugging Face folder."""
        from quadriga.engine.weights import host_state_dict
        from quadriga.workers.policy_part import PolicyPart

        weights = host_state_dict(self.engine.model)  # all ranks take part
        parts = super().checkpoint_parts()
        if self.rank == 0:
            parts["huggingface"] = PolicyPart(self.engine.model.huggingface, self.tokenizer, weights)
        return parts
