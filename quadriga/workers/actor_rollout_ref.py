"""The policy in a slot."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from quadriga.config.schema import Config
from quadriga.controller.dispatch import Dispatch, register
from quadriga.protocol import DataProto
from quadriga.workers.base import LearningWorker, named
from quadriga.workers.losses import actor_loss
from quadriga.workers.rollout_rows import longest, requests_of, rows_of
from quadriga.workers.updates import mean_of, micro_batch_limits, mini_batches


class ActorRolloutRefWorker(LearningWorker):
    """The policy: it is trained (actor), it generates (rollout), and its frozen start is the reference (ref).

    Args:
        config: the whole, checked configuration.
        role: `actor_rollout`, or `ref` for a frozen copy that only gives log-probs.
    """

    def __init__(self, config: Config, role: str) -> None:
        super().__init__(config, role)
        self.policy_config = config.actor_rollout_ref
        self.is_actor = role != "ref"
        self._generation = 0
        self._finished: deque[tuple[str, int, list[int]]] = deque()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        """Load the model and, for the actor, make its optimiser and its rollout engine."""
        from quadriga.engine import TrainingEngine
        from quadriga.models.load import load_policy, load_tokenizer

        cfg = self.policy_config
        self.tokenizer = load_tokenizer(cfg.model.tokenizer_path or cfg.model.path, cfg.model.trust_remote_code)
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
        if self.is_actor:
            self._start_rollout()

    def _start_rollout(self) -> None:
        from quadriga.rollout.registry import create_engine

        rollout = self.policy_config.rollout
        self.pad_token_id = int(self.tokenizer.pad_token_id)
        # One process that holds whole weights generates with the training module itself; shards need a module of their own.
        self.shares_weights = self.world_size == 1 and not self.policy_config.actor.fsdp_config.param_offload
        module = self.engine.model.huggingface if self.shares_weights else self._whole_copy()
        eos = module.generation_config.eos_token_id if module.generation_config is not None else None
        eos_ids = {self.tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        self.rollout = create_engine(
            rollout.name,
            module=module,
            eos_token_ids=sorted(int(t) for t in eos_ids),
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.prompt_length + rollout.response_length,
        )

    def _whole_copy(self) -> Any:
        from dataclasses import replace

        from quadriga.models.load import load_policy

        return load_policy(replace(self.policy_config.model, lora_rank=0), trainable=False).huggingface.to(
            self.device_name
        )

    # ---- rollout ----

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """A response for every row. meta_info: `sampling` (arguments of SamplingParams), `step`, `version` of the weights,
        and `generation`, the number under which `take_finished` tells of samples meanwhile."""
        import torch

        from quadriga.engine.sharding import max_over_ranks
        from quadriga.rollout.sampling import SamplingParams

        meta = prompts.meta_info
        params = SamplingParams(**meta["sampling"])
        requests = requests_of(prompts, params, meta["step"])
        self._finished.clear()
        self._generation = meta["generation"]
        completions = []
        with torch.no_grad():
            for completion in self.rollout.generate(requests, expected_version=meta["version"]):
                completions.append(completion)
                self._finished.append((completion.request_id, completion.sample_index, completion.token_ids))
        width = max_over_ranks(longest(completions), self.engine.device)
        truncated = params.top_p < 1 or params.top_k > 0
        return rows_of(prompts, completions, width, self.pad_token_id, truncated)

    def take_finished(self, generation: int) -> list[tuple[str, int, list[int]]]:
        """(uid, sample index, token ids) of the samples that have finished since the last time; asked while generating."""
        if generation != self._generation:
            return []  # it has not begun yet
        return [self._finished.popleft() for _ in range(len(self._finished))]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, version: int) -> Any:
        """Hand the trained weights to the rollout engine; its echo says which version it holds."""
        return self.rollout.update_weights(version, None if self.shares_weights else self.engine.full_weights())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        self.rollout.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake(self) -> None:
        self.rollout.wake()

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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, folder: str) -> str:
        """Write the policy, with its adapter merged, as a Hugging Face folder that `from_pretrained` loads."""
        from quadriga.engine.weights import host_state_dict

        weights = host_state_dict(self.engine.model)
        if self.rank == 0:
            self.engine.model.huggingface.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)
        return folder
