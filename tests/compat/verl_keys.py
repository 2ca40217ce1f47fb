"""Every key of verl's trees of January and August 2026 with its default: what a command line may set to what it is anyway."""

from __future__ import annotations

from typing import Any

import yaml

A = "actor_rollout_ref"

OPTIMISER = """
optimizer: AdamW
optimizer_impl: torch.optim
lr: 1.0e-06
lr_warmup_steps_ratio: 0.0
total_training_steps: -1
weight_decay: 0.01
lr_warmup_steps: -1
betas: [0.9, 0.999]
clip_grad: 1.0
min_lr_ratio: 0.0
num_cycles: 0.5
lr_scheduler_type: constant
zero_indexed_step: true
warmup_style: constant
override_optimizer_config: null
"""
FSDP = """
wrap_policy.min_num_params: 0
param_offload: false
optimizer_offload: false
offload_policy: false
reshard_after_forward: true
fsdp_size: -1
forward_prefetch: false
model_dtype: fp32
use_orig_params: false
seed: 42
full_determinism: false
ulysses_sequence_parallel_size: 1
entropy_from_logits_with_chunking: false
entropy_from_logits_chunk_size: 2048
use_torch_compile: true
entropy_checkpointing: false
use_no_sync_for_gradient_accumulation: true
pad_to_length: false
pad_to_length_bucket: 1024
forward_only: false
strategy: fsdp
dtype: bfloat16
qat.enable: false
qat.mode: w4a16
qat.group_size: 16
qat.ignore_patterns: [lm_head, embed_tokens]
qat.activation_observer: static_minmax
qat.quantization_config_path: null
turbo_config.distributed.fully_shard_parallel_size: 16
turbo_config.distributed.fsdp_plan.param_dtype: bf16
_target_: verl.workers.config.FSDPEngineConfig
"""
PROFILER = """
tool: null
enable: false
all_ranks: false
ranks: []
save_path: null
relocate_results: false
finish_hook_cmd: null
finish_hook_all_ranks: false
finish_hook_ranks: []
tool_config.nsys.discrete: false
tool_config.npu.contents: []
tool_config.npu.level: level0
tool_config.torch.contents: []
tool_config.torch.discrete: false
tool_config.torch.schedule.active: 0
tool_config.torch.step_start: 0
tool_config.torch_memory.stack_depth: 32
tool_config.precision_debugger.strict: false
"""
CHECKPOINT = """
save_contents: [model, optimizer, extra]
load_contents: [model, optimizer, extra]
async_save: false
strict: true
mbridge_config: {}
"""
MODEL = """
path: /models/m
hf_config_path: null
tokenizer_path: null
use_shm: false
trust_remote_code: false
custom_chat_template: null
external_lib: null
override_config: {}
enable_gradient_checkpointing: true
enable_activation_offload: false
use_remove_padding: true
lora_rank: 0
lora_alpha: 16
target_modules: all-linear
exclude_modules: null
lora_adapter_path: null
use_liger: false
use_fused_kernels: false
fused_kernel_options.impl_backend: torch
tiled_mlp.enabled: false
tiled_mlp.num_shards: 4
mtp.enable: false
mtp.enable_train: false
mtp.enable_rollout: false
mtp.mtp_loss_scaling_factor: 0.1
mtp.method: mtp
lora.type: lora
lora.merge: false
lora.rank: 0
lora.alpha: 32
lora.dropout: 0.0
lora.target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]
lora.exclude_modules: []
lora.dropout_position: pre
lora.lora_A_init_method: xavier
lora.lora_B_init_method: zero
lora.a2a_experimental: false
lora.dtype: null
lora.adapter_path: null
lora.freeze_vision_model: true
"""
ACTOR = """
rollout_n: 1
strategy: fsdp
ppo_mini_batch_size: 256
ppo_micro_batch_size: null
ppo_micro_batch_size_per_gpu: null
use_dynamic_bsz: true
ppo_max_token_len_per_gpu: 16384
clip_ratio: 0.2
clip_ratio_low: 0.2
clip_ratio_high: 0.2
tau_pos: 1.0
tau_neg: 1.05
freeze_vision_tower: false
policy_loss.loss_mode: vanilla
policy_loss.clip_cov_ratio: 0.0002
policy_loss.clip_cov_lb: 1.0
policy_loss.clip_cov_ub: 5.0
policy_loss.kl_cov_ratio: 0.0002
policy_loss.ppo_kl_coef: 0.1
policy_loss.dro_beta: null
clip_ratio_c: 3.0
loss_agg_mode: token-mean
loss_scale_factor: null
entropy_coeff: 0
calculate_entropy: false
calculate_sum_pi_squared: false
use_kl_loss: false
use_prefix_grouper: false
use_torch_compile: true
kl_loss_coef: 0.001
kl_loss_type: low_var_kl
ppo_epochs: 1
shuffle: false
data_loader_seed: 42
use_fused_kernels: false
router_replay.mode: disabled
router_replay.record_file: null
router_replay.replay_file: null
qat.enable: false
qat.mode: w4a16
grad_clip: 1.0
ulysses_sequence_parallel_size: 1
entropy_from_logits_with_chunking: false
entropy_from_logits_chunk_size: 2048
entropy_checkpointing: false
pad_to_length: false
use_remove_padding: true
"""
REF = """
rollout_n: 1
strategy: fsdp
use_torch_compile: true
log_prob_micro_batch_size: null
log_prob_micro_batch_size_per_gpu: null
log_prob_use_dynamic_bsz: true
log_prob_max_token_len_per_gpu: 16384
router_replay.mode: disabled
ulysses_sequence_parallel_size: 1
entropy_from_logits_with_chunking: false
entropy_from_logits_chunk_size: 2048
entropy_checkpointing: false
pad_to_length: false
model: null
"""
ROLLOUT = """
name: vllm
mode: async
nnodes: 0
n_gpus_per_node: 8
temperature: 1.0
top_k: -1
top_p: 1
full_determinism: false
seed: 42
prompt_length: 512
response_length: 512
dtype: bfloat16
gpu_memory_utilization: 0.5
ignore_eos: false
enforce_eager: false
cudagraph_capture_sizes: null
free_cache_engine: true
tensor_model_parallel_size: 2
data_parallel_size: 1
expert_parallel_size: 1
pipeline_model_parallel_size: 1
max_num_batched_tokens: 8192
max_model_len: null
max_num_seqs: 256
enable_chunked_prefill: true
enable_prefix_caching: true
logprobs_mode: processed_logprobs
scheduling_policy: fcfs
load_format: dummy
layered_summon: false
log_prob_micro_batch_size: null
log_prob_micro_batch_size_per_gpu: null
log_prob_use_dynamic_bsz: true
log_prob_max_token_len_per_gpu: 16384
disable_log_stats: true
do_sample: true
n: 1
over_sample_rate: 0
multi_stage_wake_up: false
engine_kwargs.vllm: {}
engine_kwargs.sglang: {}
engine_kwargs.trtllm: {}
val_kwargs.top_k: -1
val_kwargs.top_p: 1.0
val_kwargs.temperature: 0
val_kwargs.n: 1
val_kwargs.do_sample: false
multi_turn.enable: false
multi_turn.max_assistant_turns: null
multi_turn.tool_config_path: null
multi_turn.function_tool_path: null
multi_turn.interaction_config_path: null
multi_turn.max_user_turns: null
multi_turn.max_parallel_calls: 1
multi_turn.max_tool_response_length: 256
multi_turn.tool_response_truncate_side: middle
multi_turn.use_inference_chat_template: false
multi_turn.tokenization_sanity_check_mode: strict
multi_turn.format: hermes
multi_turn.num_repeat_rollouts: null
calculate_log_probs: true
agent.num_workers: 8
agent.default_agent_loop: single_turn_agent
agent.agent_loop_config_path: null
agent.custom_async_server.path: null
agent.custom_async_server.name: null
checkpoint_engine.backend: naive
checkpoint_engine.update_weights_bucket_megabytes: 2048
checkpoint_engine.engine_kwargs: {}
checkpoint_engine.custom_backend_module: null
update_weights_bucket_megabytes: 512
trace.project_name: p
trace.backend: null
trace.token2text: false
trace.max_samples_per_step_per_worker: null
skip_tokenizer_init: true
skip_rollout: false
skip_dump_dir: /dump
enable_rollout_routing_replay: false
moe_load_balance_metrics_interval: 0
prometheus.enable: false
prometheus.port: 9090
prometheus.file: /prometheus.yml
prometheus.served_model_name: m
quantization: null
quantization_config_file: null
mtp: null
qat: null
limit_images: null
disaggregation.enabled: false
disaggregation.prefill_replicas: 1
disaggregation.transfer_backend: nixl
"""
CRITIC = """
rollout_n: 1
strategy: fsdp
enable: null
ppo_mini_batch_size: 256
ppo_micro_batch_size: null
ppo_micro_batch_size_per_gpu: null
use_dynamic_bsz: true
ppo_max_token_len_per_gpu: 32768
forward_max_token_len_per_gpu: 32768
ppo_epochs: 1
shuffle: false
data_loader_seed: 42
cliprange_value: 0.5
loss_agg_mode: token-mean
loss_scale_factor: null
forward_micro_batch_size: null
forward_micro_batch_size_per_gpu: null
ulysses_sequence_parallel_size: 1
grad_clip: 1.0
"""
REWARD_ENGINE = """
name: vllm
dtype: bfloat16
gpu_memory_utilization: 0.5
enforce_eager: true
cudagraph_capture_sizes: null
free_cache_engine: true
data_parallel_size: 1
expert_parallel_size: 1
tensor_model_parallel_size: 2
max_num_batched_tokens: 8192
max_model_len: null
max_num_seqs: 1024
load_format: auto
engine_kwargs: {}
limit_images: null
enable_chunked_prefill: true
enable_prefix_caching: true
disable_log_stats: true
skip_tokenizer_init: false
prompt_length: 2048
response_length: 2048
temperature: 1.0
top_k: -1
quantization: null
disaggregation.enabled: false
"""
REWARD_MODEL = """
enable: false
strategy: fsdp
model.input_tokenizer: /models/m
model.external_lib: null
model.trust_remote_code: false
model.use_shm: false
model.use_remove_padding: false
model.use_fused_kernels: false
micro_batch_size: null
micro_batch_size_per_gpu: null
max_length: null
use_dynamic_bsz: true
forward_max_token_len_per_gpu: 32768
reward_manager: naive
launch_reward_fn_async: false
enable_resource_pool: false
n_gpus_per_node: 8
nnodes: 1
num_workers: 8
use_reward_loop: true
reward_loop_source: null
reward_loop_module_path: null
reward_loop_class_name: null
sandbox_fusion.url: null
sandbox_fusion.max_concurrent: 64
sandbox_fusion.memory_limit_mb: 1024
ulysses_sequence_parallel_size: 1
"""
REST = """
actor_rollout_ref.hybrid_engine: true
actor_rollout_ref.nccl_timeout: 600
data.tokenizer: null
data.use_shm: false
data.train_files: /data/train.parquet
data.val_files: /data/test.parquet
data.train_max_samples: -1
data.val_max_samples: -1
data.prompt_key: prompt
data.reward_fn_key: data_source
data.max_prompt_length: 512
data.max_response_length: 512
data.train_batch_size: 1024
data.gen_batch_size: null
data.val_batch_size: null
data.tool_config_path: null
data.function_tool_path: null
data.return_raw_input_ids: false
data.return_raw_chat: true
data.return_full_prompt: false
data.shuffle: true
data.seed: null
data.dataloader_num_workers: 8
data.image_patch_size: 14
data.validation_shuffle: false
data.filter_overlong_prompts: false
data.filter_overlong_prompts_workers: 1
data.truncation: error
data.image_key: images
data.video_key: videos
data.audio_key: audios
data.trust_remote_code: false
data.custom_cls.path: null
data.custom_cls.name: null
data.return_multi_modal_inputs: true
data.sampler.class_path: null
data.sampler.class_name: null
data.datagen.path: null
data.datagen.name: null
data.apply_chat_template_kwargs: {}
data.mm_processor_kwargs: {}
custom_reward_function.path: null
custom_reward_function.name: compute_score
sandbox_fusion.url: null
sandbox_fusion.max_concurrent: null
reward.num_workers: 8
reward.custom_reward_function.path: null
reward.custom_reward_function.name: compute_score
reward.reward_manager.source: register
reward.reward_manager.name: naive
reward.reward_manager.module.path: null
reward.reward_model.enable: false
reward.reward_model.enable_resource_pool: false
reward.reward_model.n_gpus_per_node: 8
reward.reward_model.nnodes: 0
reward.reward_model.model_path: null
reward.sandbox_fusion.url: null
reward.sandbox_fusion.max_concurrent: 64
reward.sandbox_fusion.memory_limit_mb: 1024
algorithm.rollout_correction.rollout_is: null
algorithm.rollout_correction.rollout_is_threshold: 2.0
algorithm.rollout_correction.rollout_rs: null
algorithm.rollout_correction.rollout_rs_threshold: null
algorithm.rollout_correction.bypass_mode: false
algorithm.rollout_correction.loss_type: ppo_clip
algorithm.rollout_correction.rollout_is_batch_normalize: false
algorithm.gamma: 1.0
algorithm.lam: 1.0
algorithm.adv_estimator: gae
algorithm.norm_adv_by_std_in_grpo: true
algorithm.filter_groups.enable: false
algorithm.filter_groups.metric: null
algorithm.filter_groups.max_num_gen_batches: 0
algorithm.filter_groups.max_inflight_gen_batches: 1
algorithm.use_kl_in_reward: false
algorithm.kl_penalty: kl
algorithm.kl_ctrl.type: fixed
algorithm.kl_ctrl.kl_coef: 0.001
algorithm.kl_ctrl.horizon: 10000
algorithm.kl_ctrl.target_kl: 0.1
algorithm.use_pf_ppo: false
algorithm.pf_ppo.reweight_method: pow
algorithm.pf_ppo.weight_pow: 2.0
distillation.enabled: false
distillation.distillation_loss.loss_mode: k3
distillation.distillation_loss.topk: 32
distillation.distillation_loss.use_task_rewards: true
distillation.distillation_loss.distillation_loss_coef: 1.0
distillation.distillation_loss.loss_max_clamp: null
distillation.distillation_loss.log_prob_min_clamp: null
distillation.distillation_loss.use_policy_gradient: false
distillation.distillation_loss.policy_loss_mode: vanilla
distillation.distillation_loss.clip_ratio: 0.2
distillation.distillation_loss.clip_ratio_low: 0.2
distillation.distillation_loss.clip_ratio_high: 0.2
distillation.n_gpus_per_node: 8
distillation.nnodes: 0
distillation.teacher_key: data_source
distillation.teacher_models.teacher_model.key: null
distillation.teacher_models.teacher_model.model_path: null
distillation.teacher_models.teacher_model.num_replicas: 0
distillation.teacher_models.teacher_model.inference.name: vllm
distillation.teacher_models.teacher_model.inference.gpu_memory_utilization: 0.5
transfer_queue.enable: false
transfer_queue.metrics.enabled: false
transfer_queue.metrics.port: 0
transfer_queue.backend.storage_backend: SimpleStorage
transfer_queue.backend.SimpleStorage.total_storage_size: 100000
trainer.balance_batch: true
trainer.total_epochs: 30
trainer.total_training_steps: null
trainer.project_name: verl_examples
trainer.experiment_name: gsm8k
trainer.logger: [console, wandb]
trainer.log_val_generations: 0
trainer.rollout_data_dir: null
trainer.validation_data_dir: null
trainer.nnodes: 1
trainer.n_gpus_per_node: 8
trainer.save_freq: -1
trainer.esi_redundant_time: 0
trainer.resume_mode: auto
trainer.resume_from_path: null
trainer.val_before_train: true
trainer.val_only: false
trainer.test_freq: -1
trainer.critic_warmup: 0
trainer.default_hdfs_dir: null
trainer.del_local_ckpt_after_load: false
trainer.default_local_dir: checkpoints/p/e
trainer.max_actor_ckpt_to_keep: null
trainer.max_critic_ckpt_to_keep: null
trainer.ray_wait_register_center_timeout: 300
trainer.device: cuda
trainer.use_legacy_worker_impl: auto
trainer.use_v1: true
trainer.v1.trainer_mode: sync
trainer.v1.sync: {}
trainer.v1.colocate_async.num_warmup_batches: 1
trainer.v1.separate_async.parameter_sync_step: 4
trainer.v1.separate_async.hybrid_rollout.enable_switch: false
trainer.v1.sampler.max_off_policy_threshold: 8
trainer.v1.sampler.max_off_policy_strategy: drop
trainer.v1.sampler.sync_refill_failed_groups: false
trainer.v1.sampler.custom_sampler.path: null
trainer.v1.sampler.sampler_kwargs: {}
global_profiler.tool: null
global_profiler.steps: null
global_profiler.profile_continuous_steps: false
global_profiler.save_path: outputs/profile
global_profiler.relocate_results: false
global_profiler.global_tool_config.nsys.discrete: false
global_profiler.global_tool_config.nsys.controller_nsight_options.trace: cuda,nvtx,cublas,ucx
global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries: 100000
skip.rollout.enable: false
skip.rollout.dump_dir: /dump
skip.rollout.steps: []
skip.rollout_tq.enable: false
skip.async_rollout.action: cache
ray_kwargs.ray_init.num_cpus: null
ray_kwargs.ray_init.runtime_env.py_executable: null
ray_kwargs.timeline_json_file: null
"""

_SECTIONS = {
    f"{A}.actor.": ACTOR,
    f"{A}.actor.optim.": OPTIMISER,
    f"{A}.actor.fsdp_config.": FSDP,
    f"{A}.actor.checkpoint.": CHECKPOINT,
    f"{A}.actor.profiler.": PROFILER,
    f"{A}.ref.": REF,
    f"{A}.ref.fsdp_config.": FSDP,
    f"{A}.ref.profiler.": PROFILER,
    f"{A}.rollout.": ROLLOUT,
    f"{A}.rollout.profiler.": PROFILER,
    f"{A}.model.": MODEL,
    "critic.": CRITIC,
    "critic.optim.": OPTIMISER,
    "critic.fsdp.": FSDP,
    "critic.model.": MODEL,
    "critic.model.fsdp_config.": FSDP,
    "critic.checkpoint.": CHECKPOINT,
    "critic.profiler.": PROFILER,
    "reward_model.": REWARD_MODEL,
    "reward_model.model.fsdp_config.": FSDP,
    "reward_model.rollout.": REWARD_ENGINE,
    "reward_model.profiler.": PROFILER,
    "reward.reward_model.rollout.": REWARD_ENGINE,
    "": REST,
}


def all_verl_defaults() -> dict[str, Any]:
    """Dotted key → default, of the reinforcement-learning trainer."""
    return {
        f"{prefix}{name}": value for prefix, text in _SECTIONS.items() for name, value in yaml.safe_load(text).items()
    }


SFT = """
data.train_batch_size: 256
data.micro_batch_size: null
data.micro_batch_size_per_gpu: 4
data.max_token_len_per_gpu: 8192
data.use_dynamic_bsz: true
data.train_files: /data/train.parquet
data.val_files: null
data.train_max_samples: -1
data.val_max_samples: -1
data.messages_key: messages
data.tools_key: tools
data.enable_thinking_key: enable_thinking
data.enable_thinking_default: none
data.pad_mode: no_padding
data.max_length: 1024
data.truncation: error
data.balance_dp_token: false
data.custom_cls.path: null
data.custom_cls.name: null
data.use_shm: false
data.apply_chat_template_kwargs: {}
data.num_workers: 8
data.ignore_input_ids_mismatch: false
data.prompt_key: question
data.response_key: answer
data.prompt_dict_keys: null
data.response_dict_keys: null
data.multiturn.enable: false
data.multiturn.messages_key: messages
data.multiturn.tools_key: tools
data.chat_template: null
checkpoint.save_contents: [model, optimizer, extra]
checkpoint.load_contents: [model, optimizer, extra]
trainer.default_local_dir: checkpoints/p/e
trainer.default_hdfs_dir: null
trainer.project_name: gsm8k-sft
trainer.experiment_name: test
trainer.total_epochs: 4
trainer.total_training_steps: null
trainer.logger: [console, wandb]
trainer.seed: 1
trainer.save_freq: -1
trainer.test_freq: -1
trainer.max_ckpt_to_keep: null
trainer.balance_batch: true
trainer.resume_mode: auto
trainer.resume_from_path: null
trainer.device: cuda
trainer.nnodes: 1
trainer.n_gpus_per_node: 1
trainer.profile_interval: [-1, -1]
trainer.checkpoint.save_contents: [model, optimizer, extra]
ulysses_sequence_parallel_size: 1
use_remove_padding: false
"""
_SFT_SECTIONS = {"": SFT, "model.": MODEL, "engine.": FSDP, "optim.": OPTIMISER, "profiler.": PROFILER}


def all_verl_sft_defaults() -> dict[str, Any]:
    """Dotted key → default, of both supervised trainers together."""
    return {
        f"{prefix}{name}": value
        for prefix, text in _SFT_SECTIONS.items()
        for name, value in yaml.safe_load(text).items()
    }
