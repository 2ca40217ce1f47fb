"""The policy in a slot."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from quadriga.config.needs import need_sum_pi_squared, need_teacher_top_k
from quadriga.config.placement import placement_of
from quadriga.config.schema import Config
from quadriga.config.schema_models import FSDPConfig
from quadriga.controller.dispatch import Dispatch, register
from quadriga.engine import TrainingEngine
from quadriga.engine.sharding import is_sharded
from quadriga.engine.weights import host_state_dict
from quadriga.models.exact import check_family, check_gap
from quadriga.protocol import DataProto
from quadriga.rollout.interface import WeightsEcho
from quadriga.workers.base import LearningWorker, named
from quadriga.workers.losses import actor_loss
from quadriga.workers.mini_batch_view import MiniBatchView
from quadriga.workers.rollout import GeneratingWorker
from quadriga.workers.teacher import taught_columns
from quadriga.workers.updates import local_world_size, mean_of, micro_batch_limits, mini_batches, recomputes_activations
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
        from quadriga.models.load import load_policy
        from quadriga.models.outline import outline

        cfg = self.policy_config
        self.optimiser = cfg.actor.optim.name
        self.tokenizer = self.load_tokenizer()
        policy = load_policy(cfg.model, self.tokenizer, self.is_actor, is_sharded(self.device_name))
        check_family(policy.huggingface.config)
        if self.is_actor and self.rank == 0:
            self.prepare_export(policy)
        self.engine = TrainingEngine(
            policy,
            optim=cfg.actor.optim if self.is_actor else None,
            fsdp=cfg.actor.fsdp_config
            if self.is_actor
            else FSDPConfig(param_offload=cfg.ref.fsdp_config.param_offload, fsdp_size=cfg.ref.fsdp_config.fsdp_size),
            grad_clip=cfg.actor.grad_clip,
            total_steps=total_steps,
            device=self.device_name,
            gradient_checkpointing=self.is_actor
            and recomputes_activations(self.config, "actor", self.device_name, local_world_size()),
            sequence_parallel=(cfg.actor if self.is_actor else cfg.ref).ulysses_sequence_parallel_size,
            router_aux_loss_coef=cfg.actor.router_aux_loss_coef,
            dump_dir=Path(self.config.trainer.default_local_dir) / "dumps",
        )
        if self.is_actor and placement_of(self.config).generator == self.role:
            # One process on a CPU generates with the training module itself; shards, float32 weights of a model that
            # computes in bfloat16, and generation while the weights change need a module of their own.
            on_cpu, in_step = self.device_name == "cpu", self.config.async_training.staleness == 0
            offloads = self.engine.offload.offloads_weights
            own = self.generates_with_module
            self.shares_weights = own and on_cpu and self.world_size == 1 and in_step and not offloads
            if self.set_size > 1:
                trained = self.engine.model.huggingface
                module = self.sharded_policy(outline(trained), dict(trained.named_buffers()))
            elif self.shares_weights or not own:
                module = self.engine.model.huggingface
            else:
                module = self.blank_policy(self.engine.model.huggingface)
            self.start_service(module, self.tokenizer)

    def prepare_export(self, policy: Any) -> None:
        """What a checkpoint needs besides weights; that it can be written and read shows now, before anything is trained."""
        from quadriga.checkpoint.huggingface import policy_export

        self.export = policy_export(policy, self.tokenizer)
        folder = Path(self.config.trainer.default_local_dir).expanduser() / "checkpoints"
        self.export.rehearse(folder, self.policy_config.model.trust_remote_code)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self) -> int:
        """With the Hugging Face folder."""
        return super().checkpoint_bytes() + (self.export.bytes if self.rank == 0 else 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> WeightsEcho:
        """Hand the trained weights to the rollout engine here; its echo says which version it holds."""
        weights = None if self.shares_weights else self.engine.full_weights()
        return self.service.take_weights(version, weights, tells=False)

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
        """`old_log_probs` `[B, R]` by the actor as it is now, and `sum_pi_squared` where an estimator takes it."""
        rollout = self.policy_config.rollout
        limits = micro_batch_limits(rollout, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
        squares = need_sum_pi_squared(self.config)
        statistics = self.engine.token_statistics(data, rollout.temperature, with_sum_pi_squared=squares, **limits)
        columns = {"old_log_probs": statistics["log_probs"]}
        if squares:
            columns["sum_pi_squared"] = statistics["sum_pi_squared"]
        return DataProto.from_dict(tensors=columns)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """`ref_log_prob` `[B, R]` by the policy's frozen start: this worker's model, or the actor without its adapter."""
        ref = self.policy_config.ref
        limits = micro_batch_limits(ref, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
        with self.engine.adapter_off() if self.is_actor else nullcontext():
            log_probs, _ = self.engine.log_probs(data, self.policy_config.rollout.temperature, **limits)
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_self_teacher(self, data: DataProto) -> DataProto:
        """The columns of a teacher (`workers.teacher`) by the actor as it is now, for rows with a hint in the prompt."""
        return DataProto.from_dict(tensors=taught_columns(self.engine, data, self.config))

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
        meta, by_update = data.meta_info, []
        loss_fn = actor_loss(
            actor,
            max_response_length=self.config.data.max_response_length,
            loss_type=self.config.algorithm.rollout_correction.loss_type,
            entropy_coeff=meta.get("entropy_coeff"),
            version=meta["step"],
            distillation=self.config.distillation if self.config.distillation.enabled else None,
        )
        top_ids = "teacher_top_ids" if need_teacher_top_k(self.config) else None
        view = MiniBatchView(self.config, self.engine)
        temperature = self.policy_config.rollout.temperature
        for number, part in enumerate(parts):
            seen = view.add(part, draw=meta["step"] * 1009 + number)
            figures = self.engine.train_mini_batch(
                part, loss_fn, temperature=temperature, with_entropy=True, other_ids=top_ids, **limits
            )
            by_update.append(figures | seen)
        self.engine.end_step()
        for later in by_update[1:]:  # they meet weights that have moved since: no gap of the rollout
            later.pop("rollout/logprob_diff_mean", None)
            later.pop("rollout/logprob_diff_max", None)
        if self.config.async_training.staleness == 0:
            # The first mini-batch meets the weights that generated it.
            check_gap(by_update[0].get("rollout/logprob_diff_mean"))
        figures = mean_of(by_update)
        if actor.use_kl_loss:
            figures["kl_coef"] = actor.kl_loss_coef
        return DataProto(meta_info={"metrics": named(figures, "actor")})

    def checkpoint_parts(self) -> dict[str, Any]:
        """The engine's state, and on the first rank the policy as a Hugging Face folder."""
        from quadriga.checkpoint.huggingface import PART

        weights = host_state_dict(self.engine.model)  # all ranks take part
        parts = super().checkpoint_parts()
        if self.rank == 0:
            parts[PART] = self.export.part(weights)
        return parts
