"""The keys that verl has and Quadriga does not, one row each: see `carry_over` for how they are used.

The first row whose pattern matches decides; `*` stands for any part of a key, dots included. A row that ends in `.*` is
about a whole section. A value that says what Quadriga does anyway is accepted; all others need a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ForeignKey:
    """Keys that match `pattern`: the values that ask for nothing else, and why all others are refused."""

    pattern: str
    accepts: Callable[[Any], bool]
    why: str = ""
    instead: str = "remove it"


@dataclass(frozen=True)
class Renamed:
    """Keys that have another name here. A `*` at the end of both stands for the same text."""

    pattern: str
    here: str

    def target(self, path: str) -> str:
        return self.here.removesuffix("*") + (path[len(self.pattern) - 1 :] if self.here.endswith("*") else "")


def fixed(pattern: str, value: Any, why: str, instead: str = "remove it") -> ForeignKey:
    """Quadriga always does what `value` (or each of a tuple of values) says."""
    values = value if isinstance(value, tuple) else (value,)
    # Type and value, since 1 == True in Python.
    return ForeignKey(pattern, lambda given: any(type(given) is type(v) and given == v for v in values), why, instead)


def refused(pattern: str, why: str, instead: str = "remove it") -> ForeignKey:
    """Quadriga has nothing of the kind."""
    return ForeignKey(pattern, lambda given: False, why, instead)


def no_matter(pattern: str) -> ForeignKey:
    """Every value describes an inner working of another system that changes no result."""
    return ForeignKey(pattern, lambda given: True)


renamed = Renamed


def _is_complete_checkpoint(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and {"model", "optimizer", "extra"} <= set(given)


NO_MEGATRON = "Quadriga trains with FSDP2 only; there is no Megatron engine"
NO_MODEL_PARALLEL = "the native rollout engine has one replica per GPU and does not split a model over GPUs"
NO_MULTI_TURN = "Quadriga generates single-turn responses: there are no tools, agents or interactions"
NO_MULTIMODAL = "Quadriga trains on text only"
NO_PROFILER = "Quadriga has no profiler section; each run writes timeline.json with the seconds of every phase"
NO_COV = "the losses clip_cov and kl_cov are not there"
PACKED = "sequences are always packed without padding"
CHUNKED = "log-probs and entropy are always computed in chunks"
ONE_CHECKPOINT = (
    "a checkpoint always holds weights, optimiser, schedule and RNG, and a Hugging Face export of the policy"
)

TABLE: tuple[ForeignKey | Renamed, ...] = (
    # Data
    renamed("data.tokenizer", "actor_rollout_ref.model.tokenizer_path"),
    renamed("data.trust_remote_code", "actor_rollout_ref.model.trust_remote_code"),
    no_matter("data.return_raw_chat"),
    fixed("data.return_raw_input_ids", False, "the prompt's token ids are in every batch already"),
    fixed("data.return_full_prompt", False, "rollout_data_dir writes every prompt in full"),
    no_matter("data.return_multi_modal_inputs"),
    fixed("data.filter_overlong_prompts_workers", 1, "prompts are tokenised once, by the tokenizer's threads"),
    fixed("data.dataloader_num_workers", 0, "rows are tokenised once at the start; no loader process is needed"),
    fixed("data.validation_shuffle", False, "validation rows are taken in file order"),
    refused(
        "data.gen_batch_size",
        "with dynamic sampling each generation batch has data.train_batch_size prompts",
        "remove it; algorithm.filter_groups.max_num_gen_batches bounds how many are drawn",
    ),
    fixed("data.image_key", "images", NO_MULTIMODAL),
    fixed("data.video_key", "videos", NO_MULTIMODAL),
    refused("data.audio_key", NO_MULTIMODAL),
    no_matter("data.image_patch_size"),
    refused("data.tool_config_path", NO_MULTI_TURN),
    refused("data.datagen.*", "rows are not generated during a run", "write a dataset class: data.custom_cls"),
    fixed("data.use_shm", False, "files are read where they are"),
    refused("data.cache_dir", "files are read where they are"),
    # Policy model
    renamed("actor_rollout_ref.model.custom_chat_template", "data.chat_template"),
    renamed("actor_rollout_ref.model.lora.rank", "actor_rollout_ref.model.lora_rank"),
    renamed("actor_rollout_ref.model.lora.alpha", "actor_rollout_ref.model.lora_alpha"),
    renamed("actor_rollout_ref.model.lora.target_modules", "actor_rollout_ref.model.target_modules"),
    refused("*.model.lora.*", "LoRA has three keys: lora_rank, lora_alpha and target_modules"),
    refused("*.model.exclude_modules", "LoRA modules are chosen by name", "list them in model.target_modules"),
    refused("*.model.target_parameters", "LoRA modules are chosen by name", "list them in model.target_modules"),
    refused("*.model.lora_adapter_path", "a run starts from a whole model", "merge the adapter into the model first"),
    fixed("actor_rollout_ref.hybrid_engine", True, "actor and rollout share their workers"),
    fixed("*.use_remove_padding", True, PACKED),
    fixed("*.use_fused_kernels", False, f"{CHUNKED}, which needs no special kernel"),
    no_matter("*.fused_kernel_options.*"),
    fixed("*.use_liger", False, "Quadriga does not replace the layers of a model"),
    fixed("*.tiled_mlp.enabled", False, "Quadriga does not replace the layers of a model"),
    no_matter("*.tiled_mlp.*"),
    fixed(
        "*.enable_activation_offload",
        False,
        "activations stay on the device",
        "set enable_gradient_checkpointing=True, or lower ppo_max_token_len_per_gpu",
    ),
    fixed("*.model.use_shm", False, "a model is read where it lies"),
    refused(
        "*.model.external_lib",
        "Quadriga imports no code by itself",
        "set model.trust_remote_code=True if the code comes with the model",
    ),
    refused("*.model.hf_config_path", "the config lies in the model's folder", "use model.override_config for changes"),
    fixed("*.model.mtp.enable", False, "models are trained without multi-token prediction"),
    no_matter("*.model.mtp.*"),
    # Engines
    fixed("*.strategy", ("fsdp", "fsdp2"), "Quadriga trains with FSDP2", "use fsdp2, or remove it"),
    refused("*.megatron.*", NO_MEGATRON, "remove the section; FSDP2 shards over all workers of a role"),
    refused("*.veomni.*", "Quadriga trains with FSDP2 only"),
    refused("*.torchtitan.*", "Quadriga trains with FSDP2 only"),
    fixed("model_engine", ("dp", "fsdp"), "Quadriga trains with FSDP2 only"),
    refused(
        "*.override_optimizer_config.*",
        "the optimiser is AdamW",
        "set actor.fsdp_config.optimizer_offload=True for an optimiser in host memory",
    ),
    no_matter("critic.model.tokenizer_path"),
    renamed("critic.model.fsdp_config.*", "critic.fsdp_config.*"),
    renamed("critic.fsdp.*", "critic.fsdp_config.*"),
    renamed("actor_rollout_ref.actor.fsdp.*", "actor_rollout_ref.actor.fsdp_config.*"),
    renamed("actor_rollout_ref.ref.fsdp.*", "actor_rollout_ref.ref.fsdp_config.*"),
    fixed(
        "*.ulysses_sequence_parallel_size",
        1,
        "a sequence is never split over GPUs",
        "remove it; long sequences: enable_gradient_checkpointing=True",
    ),
    fixed("*.fsdp_config.fsdp_size", -1, "weights are sharded over all workers of a role"),
    no_matter("*.fsdp_config.wrap_policy.*"),
    no_matter("*.fsdp_config.forward_prefetch"),
    no_matter("*.fsdp_config.use_orig_params"),
    fixed(
        "*.fsdp_config.offload_policy",
        False,
        "weights and optimiser are offloaded between phases",
        "set param_offload=True and optimizer_offload=True",
    ),
    fixed("*.fsdp_config.grad_offload", False, "gradients live only during an update"),
    fixed("*.fsdp_config.model_dtype", ("fp32", "float32"), "master weights are float32"),
    fixed(
        "*.fsdp_config.dtype", ("bfloat16", "bf16"), "the forward pass runs in bfloat16 on a GPU, in float32 on a CPU"
    ),
    refused("*.fsdp_config.mixed_precision.*", "the forward pass runs in bfloat16 on a GPU, in float32 on a CPU"),
    no_matter("*.fsdp_config.full_determinism"),
    refused("*.fsdp_config.seed", "seeds are data.seed and actor_rollout_ref.rollout.seed"),
    no_matter("actor_rollout_ref.ref.fsdp_config.optimizer_offload"),
    fixed(
        "actor_rollout_ref.ref.fsdp_config.reshard_after_forward",
        True,
        "the reference frees its gathered weights after the forward pass",
    ),
    fixed("*.entropy_from_logits_with_chunking", True, CHUNKED),
    fixed("*.entropy_checkpointing", False, f"{CHUNKED}, and their logits recomputed in the backward pass"),
    fixed("*.use_torch_compile", False, "models are not compiled"),
    fixed("*.load_weight", True, "weights are always loaded"),
    # Batch sizes
    renamed("actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    renamed(
        "actor_rollout_ref.ref.log_prob_micro_batch_size", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    ),
    renamed(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    ),
    renamed("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu"),
    renamed("reward_model.micro_batch_size", "reward_model.micro_batch_size_per_gpu"),
    renamed("reward_model.forward_max_token_len_per_gpu", "reward_model.max_token_len_per_gpu"),
    refused(
        "critic.forward_micro_batch_size*",
        "values are computed with the micro-batches of the update",
        "set critic.ppo_micro_batch_size_per_gpu",
    ),
    refused(
        "critic.forward_max_token_len_per_gpu",
        "values are computed with the micro-batches of the update",
        "set critic.ppo_max_token_len_per_gpu",
    ),
    refused("critic.rollout_n", "the critic sees every response", "set actor_rollout_ref.rollout.n"),
    # Update
    renamed("actor_rollout_ref.actor.optim.clip_grad", "actor_rollout_ref.actor.grad_clip"),
    renamed("critic.optim.clip_grad", "critic.grad_clip"),
    renamed("actor_rollout_ref.actor.optim.warmup_style", "actor_rollout_ref.actor.optim.lr_scheduler_type"),
    renamed("critic.optim.warmup_style", "critic.optim.lr_scheduler_type"),
    fixed("*.optim.total_training_steps", -1, "a schedule covers the whole run", "set trainer.total_training_steps"),
    fixed("*.optim.num_cycles", 0.5, "a cosine schedule falls once"),
    fixed("*.optim.optimizer", "AdamW", "the optimiser is AdamW"),
    fixed("*.optim.optimizer_impl", "torch.optim", "the optimiser is torch's AdamW"),
    no_matter("*.optim.zero_indexed_step"),
    no_matter("actor_rollout_ref.actor.calculate_entropy"),
    refused("*.data_loader_seed", "mini-batches are drawn from data.seed and the step", "set data.seed"),
    fixed("actor_rollout_ref.actor.use_prefix_grouper", False, f"{PACKED}, each with its own prompt"),
    fixed("actor_rollout_ref.actor.freeze_vision_tower", False, NO_MULTIMODAL),
    fixed("actor_rollout_ref.actor.calculate_sum_pi_squared", False, "no estimator here needs it"),
    refused("*.router_replay.*", "routing of mixture-of-experts models is not replayed"),
    refused("actor_rollout_ref.actor.policy_loss.clip_cov_*", NO_COV, "choose another loss_mode"),
    refused("actor_rollout_ref.actor.policy_loss.kl_cov_*", NO_COV, "choose another loss_mode"),
    refused("actor_rollout_ref.actor.policy_loss.ppo_kl_coef", NO_COV, "choose another loss_mode"),
    refused(
        "actor_rollout_ref.actor.tau_*",
        "the loss that it belongs to (sapo) is not there",
        "choose another actor.policy_loss.loss_mode",
    ),
    refused("actor_rollout_ref.ref.model.*", "the reference is the start of the actor", "remove it"),
    # Rollout
    fixed("actor_rollout_ref.rollout.mode", ("async", "sync"), "there is one way to generate"),
    fixed("actor_rollout_ref.rollout.*_parallel_size", 1, NO_MODEL_PARALLEL, "set it to 1, or remove it"),
    fixed(
        "actor_rollout_ref.rollout.dtype",
        ("bfloat16", "bf16"),
        "the engine generates in bfloat16 on a GPU, in float32 on a CPU",
    ),
    fixed(
        "actor_rollout_ref.rollout.enable_chunked_prefill",
        True,
        "long prompts are always processed in chunks",
        "remove it; actor_rollout_ref.rollout.max_num_batched_tokens is the chunk",
    ),
    fixed(
        "actor_rollout_ref.rollout.enable_prefix_caching",
        True,
        "a prompt is always computed once for all its responses",
    ),
    fixed(
        "actor_rollout_ref.rollout.calculate_log_probs", True, "the log-prob of every sampled token is always recorded"
    ),
    fixed(
        "actor_rollout_ref.rollout.logprobs_mode",
        "processed_logprobs",
        "log-probs are those of the distribution that was sampled from",
    ),
    refused(
        "actor_rollout_ref.rollout.max_model_len",
        "the engine makes room for data.max_prompt_length + data.max_response_length",
        "remove it",
    ),
    no_matter("actor_rollout_ref.rollout.load_format"),
    no_matter("actor_rollout_ref.rollout.layered_summon"),
    no_matter("actor_rollout_ref.rollout.disable_log_stats"),
    no_matter("actor_rollout_ref.rollout.skip_tokenizer_init"),
    no_matter("actor_rollout_ref.rollout.multi_stage_wake_up"),
    no_matter("actor_rollout_ref.rollout.update_weights_bucket_megabytes"),
    no_matter("actor_rollout_ref.rollout.checkpoint_engine.*"),
    refused(
        "actor_rollout_ref.rollout.cudagraph_capture_sizes",
        "the native engine chooses its CUDA graphs itself",
        "remove it; actor_rollout_ref.rollout.enforce_eager=True turns them off",
    ),
    fixed("actor_rollout_ref.rollout.scheduling_policy", "fcfs", "requests are served in order"),
    fixed("actor_rollout_ref.rollout.over_sample_rate", (0, 0.0), "no responses are thrown away"),
    refused(
        "actor_rollout_ref.rollout.engine_kwargs.*",
        "they are options of another engine; the native one has its keys under actor_rollout_ref.rollout",
    ),
    refused("actor_rollout_ref.rollout.limit_images", NO_MULTIMODAL),
    fixed("actor_rollout_ref.rollout.multi_turn.enable", False, NO_MULTI_TURN),
    refused("actor_rollout_ref.rollout.multi_turn.*", NO_MULTI_TURN),
    no_matter("actor_rollout_ref.rollout.agent.num_workers"),
    fixed("actor_rollout_ref.rollout.agent.default_agent_loop", "single_turn_agent", NO_MULTI_TURN),
    refused("actor_rollout_ref.rollout.agent.*", NO_MULTI_TURN),
    fixed(
        "actor_rollout_ref.rollout.skip_rollout",
        False,
        "responses are always generated anew",
        "remove it; trainer.rollout_data_dir writes them",
    ),
    refused(
        "actor_rollout_ref.rollout.skip_dump_dir", "responses are always generated anew", "set trainer.rollout_data_dir"
    ),
    fixed(
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        False,
        "routing of mixture-of-experts models is not replayed",
    ),
    refused("actor_rollout_ref.rollout.quantization*", "the engine generates with the weights as they are trained"),
    fixed("actor_rollout_ref.rollout.prometheus.enable", False, "metrics go to the run directory and trainer.logger"),
    no_matter("actor_rollout_ref.rollout.prometheus.*"),
    refused(
        "actor_rollout_ref.rollout.trace.*",
        "every response can be written by trainer.rollout_data_dir",
        "set trainer.rollout_data_dir",
    ),
    fixed("actor_rollout_ref.rollout.nnodes", 0, "rollout shares the workers of the actor"),
    refused("actor_rollout_ref.rollout.n_gpus_per_node", "rollout shares the workers of the actor"),
    # Rewards
    renamed("reward_model.overlong_buffer.*", "reward_model.reward_kwargs.overlong_buffer_cfg.*"),
    renamed("reward_model.num_workers", "reward.num_workers"),
    no_matter("reward_model.model.input_tokenizer"),
    renamed("reward.custom_reward_function.*", "custom_reward_function.*"),
    renamed("reward.reward_manager.name", "reward_model.reward_manager"),
    renamed("reward.reward_kwargs.*", "reward_model.reward_kwargs.*"),
    renamed("reward.reward_model.model_path", "reward_model.model.path"),
    refused("reward.reward_model.rollout.*", "a reward model is a sequence classifier; it does not generate"),
    renamed("reward.reward_model.*", "reward_model.*"),
    fixed(
        "reward.reward_manager.source",
        "register",
        "an own manager is named by module:class",
        "set reward_model.reward_manager=module:class",
    ),
    refused(
        "reward.reward_manager.module.*",
        "an own manager is named by module:class",
        "set reward_model.reward_manager=module:class",
    ),
    no_matter("reward_model.launch_reward_fn_async"),
    no_matter("reward_model.use_reward_loop"),
    refused(
        "reward_model.reward_loop_*",
        "an own manager is named by module:class",
        "set reward_model.reward_manager=module:class",
    ),
    refused("reward_model.rollout.*", "a reward model is a sequence classifier; it does not generate"),
    fixed(
        "reward_model.use_dynamic_bsz",
        True,
        "rows are packed up to reward_model.max_token_len_per_gpu unless reward_model.micro_batch_size_per_gpu is set",
    ),
    refused("reward_model.max_length", "the reward model sees prompt and response whole"),
    refused(
        "reward_model.model.fsdp_config.*",
        "the reward model is sharded over its workers and frees its gathered weights after the forward pass",
    ),
    refused(
        "*sandbox_fusion.*",
        "code is scored in local processes with limits",
        "see reward.timeout_s and reward.memory_limit_mb",
    ),
    # Algorithm
    fixed("algorithm.use_pf_ppo", False, "PF-PPO is not there"),
    refused("algorithm.pf_ppo.*", "PF-PPO is not there"),
    renamed("algorithm.rollout_is", "algorithm.rollout_correction.rollout_is"),
    renamed("algorithm.rollout_is_threshold", "algorithm.rollout_correction.rollout_is_threshold"),
    refused(
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "both bounds are in one key",
        "write algorithm.rollout_correction.rollout_rs_threshold=<lower>_<upper>",
    ),
    fixed("algorithm.rollout_correction.loss_type", "ppo_clip", "the loss is actor.policy_loss.loss_mode"),
    fixed("algorithm.rollout_correction.use_policy_gradient", False, "the loss is actor.policy_loss.loss_mode"),
    refused(
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "rejection is rollout_rs",
        "set algorithm.rollout_correction.rollout_rs=seq_max_k1 with its rollout_rs_threshold",
    ),
    # Run
    renamed("trainer.max_critic_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"),
    renamed("trainer.ray_wait_register_center_timeout", "controller.start_timeout_s"),
    renamed("ray_init.timeline_json_file", "ray_kwargs.timeline_json_file"),
    renamed("ray_init.*", "ray_kwargs.ray_init.*"),
    fixed("trainer.use_legacy_worker_impl", ("auto", "disable"), "there is one implementation of the workers"),
    no_matter("trainer.use_v1*"),
    refused(
        "trainer.default_hdfs_dir", "checkpoints go to a file system", "mount it and set trainer.default_local_dir"
    ),
    fixed(
        "trainer.del_local_ckpt_after_load",
        False,
        "a checkpoint is kept until newer ones replace it",
        "set trainer.max_actor_ckpt_to_keep",
    ),
    fixed(
        "trainer.remove_previous_ckpt_in_save",
        False,
        "a checkpoint is kept until newer ones replace it",
        "set trainer.max_actor_ckpt_to_keep=1",
    ),
    fixed("trainer.esi_redundant_time", 0, "a run can be killed at any moment and resumed"),
    ForeignKey("*.checkpoint.save_contents", _is_complete_checkpoint, ONE_CHECKPOINT),
    ForeignKey("*.checkpoint.load_contents", _is_complete_checkpoint, ONE_CHECKPOINT),
    fixed("*.checkpoint.async_save", False, "a checkpoint is complete when the next step starts"),
    refused("*.checkpoint.*", ONE_CHECKPOINT),
    refused("trainer.profile_steps", NO_PROFILER),
    refused("global_profiler.*", NO_PROFILER),
    fixed("*.profiler.enable", False, NO_PROFILER),
    refused("*.profiler.*", NO_PROFILER),
    refused("transfer_queue.*", "the data plane is Ray's object store and has one switch", "set transfer_queue.enable"),
    fixed("distillation.enabled", False, "distillation is not there"),
    refused("distillation.*", "distillation is not there"),
    refused("async_training.*", "generation and update take turns", "remove the section"),
    no_matter("*_target_"),
)
