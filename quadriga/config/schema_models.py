"""The part of the schema that describes models and what is done with them. See `schema.py` for the conventions."""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from quadriga.config.fields import key, section
from quadriga.config.names import KL_LOSSES, LOSS_AGGREGATIONS, POLICY_LOSSES, REWARD_MANAGERS

ACTOR = "actor_rollout_ref.actor"


@dataclass
class ModelConfig:
    path: str = key("builtin:arithmetic", "Hugging Face name or folder; builtin:arithmetic is the embedded tiny model")
    tokenizer_path: str | None = key(None, "tokenizer name or folder; null: the model's")
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    override_config: dict[str, Any] = key({}, "changes to the model's own config, e.g. attention dropout")
    enable_gradient_checkpointing: bool = key(
        False, "recompute activations in the backward pass: less memory, a third more time"
    )
    lora_rank: int = key(0, "rank of a LoRA adapter; 0: train all weights", at_least=0)
    lora_alpha: int = key(16, "LoRA scale", at_least=1)
    target_modules: str | list[str] = key("all-linear", "modules that get an adapter")


@dataclass
class AuxModelConfig:
    """Model of the critic or of the reward model."""

    path: str = key("${actor_rollout_ref.model.path}", "Hugging Face name or folder")
    trust_remote_code: bool = key(
        "${actor_rollout_ref.model.trust_remote_code}", "run Python code that comes with the model"
    )
    override_config: dict[str, Any] = key({}, "changes to the model's own config")
    enable_gradient_checkpointing: bool = key(
        "${actor_rollout_ref.model.enable_gradient_checkpointing}", "recompute activations in the backward pass"
    )


@dataclass
class RewardModelPathConfig(AuxModelConfig):
    tokenizer_path: str | None = key(
        None, "its tokenizer; null: the model's. Where it is not the policy's, responses are written anew with it"
    )


@dataclass
class OptimConfig:
    lr: float = key(1e-6, "peak learning rate", at_least=0)
    lr_warmup_steps: int = key(
        -1, "steps of linear warm-up; -1: lr_warmup_steps_ratio decides", unit="steps", at_least=-1
    )
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all steps", at_least=0, at_most=1)
    lr_scheduler_type: str = key("constant", "after the warm-up", choices=("constant", "linear", "cosine", "wsd"))
    min_lr_ratio: float = key(0.0, "lowest learning rate as a share of lr", at_least=0, at_most=1)
    weight_decay: float = key(0.01, "AdamW weight decay", at_least=0)
    betas: list[float] = key([0.9, 0.999], "AdamW betas")


@dataclass
class FSDPConfig:
    param_offload: bool = key(False, "keep the weights in host memory while they are not used")
    optimizer_offload: bool = key(False, "keep the optimiser's state in host memory while it is not used")
    reshard_after_forward: bool = key(True, "free gathered weights after the forward pass: less memory, more traffic")


@dataclass
class RefFSDPConfig:
    param_offload: bool = key(False, "keep the weights in host memory while they are not used")


@dataclass
class PolicyLossConfig:
    loss_mode: str = key("vanilla", "policy loss; vanilla is PPO's clip", choices=POLICY_LOSSES, own="module:function")


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = key(
        "${data.train_batch_size}", "prompts per optimiser step, over all workers", unit="prompts", at_least=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward-backward pass; null: use_dynamic_bsz", unit="rows", at_least=1
    )
    use_dynamic_bsz: bool | None = key(
        None, "fill micro-batches up to a token budget; null: yes unless ppo_micro_batch_size_per_gpu is set"
    )
    ppo_max_token_len_per_gpu: int | str = key(
        "auto",
        "token budget of a micro-batch; auto: what fits into the GPU's memory (CPU: 16384)",
        unit="tokens",
        at_least=1,
    )
    ppo_epochs: int = key(1, "passes over a step's rows", unit="epochs", at_least=1)
    shuffle: bool = key(False, "redraw the mini-batches in every pass")
    clip_ratio: float = key(0.2, "PPO clip range around 1", above=0)
    clip_ratio_low: float | None = key(None, "lower side of it; null: clip_ratio", above=0)
    clip_ratio_high: float | None = key(None, "upper side of it; null: clip_ratio", above=0)
    clip_ratio_c: float = key(3.0, "dual clip: bound of the ratio for negative advantages", above=1)
    loss_agg_mode: str | None = key(
        None,
        "how token losses become one number; null: token-mean (gspo, geo_mean: seq-mean-token-mean)",
        choices=LOSS_AGGREGATIONS,
    )
    loss_scale_factor: float | None = key(None, "divisor of seq-mean-token-sum-norm; null: response length", above=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "which policy loss")
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = key(False, "add the KL to the reference to the loss")
    kl_loss_coef: float = key(0.001, "its weight", at_least=0)
    kl_loss_type: str = key(
        "low_var_kl",
        "KL estimator in the loss; with +: its value, but the gradient of k2",
        choices=KL_LOSSES,
        own="module:function",
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", above=0)
    optim: OptimConfig = section(OptimConfig, "optimiser")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")


@dataclass
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward pass; null: log_prob_use_dynamic_bsz", unit="rows", at_least=1
    )
    log_prob_use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | str = key(
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", "token budget of a forward pass", unit="tokens", at_least=1
    )
    fsdp_config: RefFSDPConfig = section(RefFSDPConfig, "sharding")


@dataclass
class ValKwargsConfig:
    n: int = key(1, "responses per validation prompt", unit="rows", at_least=1)
    do_sample: bool = key(False, "sample; False: greedy")
    temperature: float = key(0.0, "sampling temperature", at_least=0)
    top_p: float = key(1.0, "nucleus", above=0, at_most=1)
    top_k: int = key(-1, "keep the k likeliest tokens; -1: all", at_least=-1)


@dataclass
class RolloutConfig:
    name: str = key("native", "generation engine: the training module itself", choices=("native",))
    n: int = key(1, "responses per prompt", unit="rows", at_least=1)
    temperature: float = key(1.0, "sampling temperature", at_least=0)
    top_p: float = key(1.0, "nucleus", above=0, at_most=1)
    top_k: int = key(-1, "keep the k likeliest tokens; -1: all", at_least=-1)
    do_sample: bool = key(True, "sample; False: greedy")
    seed: int = key(1, "seed of sampling", at_least=0)
    ignore_eos: bool = key(False, "generate to the full length")
    prompt_length: int = key("${data.max_prompt_length}", "longest prompt", unit="tokens", at_least=1)
    response_length: int = key("${data.max_response_length}", "most new tokens", unit="tokens", at_least=1)
    max_num_seqs: int = key(256, "sequences decoded together", unit="rows", at_least=1)
    max_num_batched_tokens: int = key(8192, "prompt tokens processed together", unit="tokens", at_least=1)
    gpu_memory_utilization: float = key(0.5, "share of the device memory for the engine", above=0, at_most=1)
    free_cache_engine: bool = key(True, "give the engine's memory back during the update")
    enforce_eager: bool = key(False, "no CUDA graphs")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward pass for old log-probs; null: log_prob_use_dynamic_bsz", unit="rows", at_least=1
    )
    log_prob_use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | str = key(
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", "token budget of a forward pass", unit="tokens", at_least=1
    )
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig, "sampling in validation")


@dataclass
class CriticConfig:
    enable: bool | None = key(None, "null: only when adv_estimator needs values")
    model: AuxModelConfig = section(AuxModelConfig, "trunk of the value model; its head is new")
    ppo_mini_batch_size: int = key(
        f"${{{ACTOR}.ppo_mini_batch_size}}", "prompts per optimiser step", unit="prompts", at_least=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        f"${{{ACTOR}.ppo_micro_batch_size_per_gpu}}", "rows per forward-backward pass", unit="rows", at_least=1
    )
    use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | str = key(
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", "token budget of a micro-batch", unit="tokens", at_least=1
    )
    ppo_epochs: int = key(f"${{{ACTOR}.ppo_epochs}}", "passes over a step's rows", unit="epochs", at_least=1)
    shuffle: bool = key(f"${{{ACTOR}.shuffle}}", "redraw the mini-batches in every pass")
    cliprange_value: float = key(0.5, "clip range of the value around its old value", above=0)
    loss_agg_mode: str | None = key(
        f"${{{ACTOR}.loss_agg_mode}}",
        "how token losses become one number; null: token-mean",
        choices=LOSS_AGGREGATIONS,
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", above=0)
    optim: OptimConfig = section(partial(OptimConfig, lr=1e-5), "optimiser")
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")


@dataclass
class RewardModelConfig:
    enable: bool = key(False, "score with a reward model too")
    model: RewardModelPathConfig = section(RewardModelPathConfig, "sequence-classification model with one label")
    micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward pass; null: token budget", unit="rows", at_least=1
    )
    max_token_len_per_gpu: int | str = key(
        f"${{{ACTOR}.ppo_max_token_len_per_gpu}}", "token budget of a forward pass", unit="tokens", at_least=1
    )
    enable_resource_pool: bool = key(False, "a pool of its own instead of the shared one")
    n_gpus_per_node: int = key(1, "slots per node of that pool", unit="slots", at_least=1)
    nnodes: int = key(1, "nodes of that pool", unit="nodes", at_least=1)
    reward_manager: str = key("naive", "turns scores into rewards", choices=REWARD_MANAGERS, own="module:class")
    reward_kwargs: dict[str, Any] = key({}, "extra arguments of the manager, e.g. overlong_buffer_cfg")
