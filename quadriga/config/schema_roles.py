"""The part of the schema about those who learn and those who judge: actor, critic, reference, reward model. See `schema.py`."""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from quadriga.config.fields import MOST_PROCESSES, key, section
from quadriga.config.names import KL_LOSSES, LOSS_AGGREGATIONS, POLICY_LOSSES, REWARD_MANAGERS
from quadriga.config.schema_models import (
    ACTOR,
    BY_LOG_PROB_TOKENS,
    BY_ROWS,
    BY_TOKENS,
    CriticModelConfig,
    FSDPConfig,
    OptimConfig,
    ProfilerConfig,
    RefFSDPConfig,
    RewardModelPathConfig,
    budget_of_a_pass,
    log_prob_rows,
    shared_sequences,
)

CLIPPING = ".policy_loss.loss_mode!=gpg|sapo|dro|vespo|kl_cov"


@dataclass
class PolicyLossConfig:
    loss_mode: str = key("vanilla", "policy loss; vanilla is PPO's clip", choices=POLICY_LOSSES, own="module:function")
    tau_pos: float = key(
        1.0, "temperature of the gate for positive advantages", at_least=1e-3, only_if=".loss_mode=sapo"
    )
    tau_neg: float = key(1.05, "the same for the others", at_least=1e-3, only_if=".loss_mode=sapo")
    clip_cov_ratio: float = key(
        2e-4, "share of the mini-batch's tokens that is held", at_least=1e-9, at_most=1, only_if=".loss_mode=clip_cov"
    )
    clip_cov_lb: float = key(1.0, "a token may be held from this covariance on", only_if=".loss_mode=clip_cov")
    clip_cov_ub: float = key(5.0, "and up to this one", only_if=".loss_mode=clip_cov")
    kl_cov_ratio: float = key(
        2e-4, "share of the mini-batch's tokens with a penalty", at_least=1e-9, at_most=1, only_if=".loss_mode=kl_cov"
    )
    ppo_kl_coef: float = key(0.1, "weight of their penalty", at_least=0, only_if=".loss_mode=kl_cov")
    dro_beta: float | None = key(
        None, "pull towards the old policy; must be set", at_least=1e-6, only_if=".loss_mode=dro"
    )
    vespo_k_pos: float = key(2.0, "exponent k of the weight, advantages ≥ 0", at_least=0, only_if=".loss_mode=vespo")
    vespo_lambda_pos: float = key(3.0, "decay λ of the weight, advantages ≥ 0", at_least=0, only_if=".loss_mode=vespo")
    vespo_k_neg: float = key(3.0, "k, negative advantages", at_least=0, only_if=".loss_mode=vespo")
    vespo_lambda_neg: float = key(2.0, "λ, negative advantages", at_least=0, only_if=".loss_mode=vespo")
    prime_advantage_weight: float = key(1.0, "factor of the advantages", at_least=1e-6, only_if=".loss_mode=prime_rl")
    prime_kl_coef: float = key(1e-3, "weight of the squared log-ratio", at_least=0, only_if=".loss_mode=prime_rl")
    behaviour_level: str = key(
        "token", "importance weight to who sampled, by", choices=("token", "sequence"), only_if=".loss_mode=decoupled"
    )
    behaviour_cap: float = key(5.0, "largest such weight", at_least=1e-3, only_if=".loss_mode=decoupled")
    behaviour_bound: str = key(
        "mask", "weights above the cap become 0, or the cap", choices=("mask", "clamp"), only_if=".loss_mode=decoupled"
    )
    proximal: str = key(
        "recomputed",
        "the policy that is clipped around: a pass at the step's start, or A-3PO's log-linear estimate",
        choices=("recomputed", "loglinear"),
        only_if=".loss_mode=decoupled",
    )
    opsm_delta: float | None = key(
        None,
        "with any loss: drop rows of negative advantage whose mean log-prob fell by more than this since sampling; null: none",
        unit="nats per token",
        at_least=0,
    )
    entropy_top_ratio: float | None = key(
        None,
        "with any loss: only on this share of the mini-batch's tokens, those of highest entropy",
        at_least=1e-6,
        at_most=1,
    )


@dataclass
class AdaptiveEntropyConfig:
    enable: bool = key(False, "let the entropy bonus start at entropy_coeff and move by itself")
    target: float = key(
        0.2, "the bonus grows, and counts, while the entropy is not above this", unit="nats", at_least=0
    )
    step_size: float = key(0.005, "its change per step", at_least=1e-9)
    max_coeff: float = key(1.0, "its largest value", at_least=1e-9)


@dataclass
class ActorConfig:
    ppo_mini_batch_size: int = key(
        "${data.train_batch_size}", "prompts per optimiser step, over all workers", unit="prompts", at_least=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "rows per forward-backward pass; null: use_dynamic_bsz",
        unit="rows",
        at_least=1,
        only_if=BY_ROWS.format("use_dynamic_bsz"),
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
    clip_ratio: float = key(
        0.2,
        "PPO clip range around 1",
        at_least=1e-6,
        only_if=f".clip_ratio_low=null or .clip_ratio_high=null and {CLIPPING}|luspo",
    )
    clip_ratio_low: float | None = key(None, "lower side of it; null: clip_ratio", at_least=1e-6, only_if=CLIPPING)
    clip_ratio_high: float | None = key(None, "upper side of it; null: clip_ratio", at_least=1e-6, only_if=CLIPPING)
    clip_ratio_c: float | None = key(
        None,
        "bound of the ratio: of vanilla's dual clip for negative advantages (null: 3.0), of dppo_* (null: 20)",
        above=1,
        only_if=".policy_loss.loss_mode=vanilla|dppo_tv|dppo_kl",
    )
    loss_agg_mode: str | None = key(
        None,
        "how token losses become one number; null: token-mean (gspo, geo_mean, sapo: seq-mean-token-mean; luspo: -token-sum)",
        choices=LOSS_AGGREGATIONS,
    )
    loss_scale_factor: float | None = key(
        None,
        "divisor of seq-mean-token-sum-norm; null: data.max_response_length",
        at_least=1e-6,
        only_if=".loss_agg_mode=seq-mean-token-sum-norm or critic.loss_agg_mode=seq-mean-token-sum-norm",
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "which policy loss, and its options")
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    adaptive_entropy: AdaptiveEntropyConfig = section(
        AdaptiveEntropyConfig, "an entropy bonus that keeps itself up", only_if=".adaptive_entropy.enable=True"
    )
    calculate_sum_pi_squared: bool | None = key(
        None, "give an estimator Σπ² of every token; null: the token baselines, which need it"
    )
    use_kl_loss: bool = key(False, "add the KL to the reference to the loss")
    kl_loss_coef: float = key(0.001, "its weight", at_least=0, only_if=".use_kl_loss=True", zero_is_off=True)
    kl_loss_type: str = key(
        "low_var_kl",
        "KL estimator in the loss; with +: its value, but the gradient of k2",
        choices=KL_LOSSES,
        own="module:function",
        only_if=".use_kl_loss=True",
    )
    router_aux_loss_coef: float = key(
        0.0, "mixture of experts: weight of the loss that evens the experts' load", at_least=0
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", at_least=1e-6)
    optim: OptimConfig = section(OptimConfig, "optimiser")
    ulysses_sequence_parallel_size: int = shared_sequences()
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")


@dataclass
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = log_prob_rows("rows per forward pass")
    log_prob_use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | str = budget_of_a_pass(BY_LOG_PROB_TOKENS)
    ulysses_sequence_parallel_size: int = shared_sequences(f"${{{ACTOR}.ulysses_sequence_parallel_size}}")
    fsdp_config: RefFSDPConfig = section(RefFSDPConfig, "sharding")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")


@dataclass
class CriticConfig:
    enable: bool | None = key(None, "null: only when adv_estimator needs values")
    model: CriticModelConfig = section(CriticModelConfig, "trunk of the value model; its head is new")
    ppo_mini_batch_size: int = key(
        f"${{{ACTOR}.ppo_mini_batch_size}}", "prompts per optimiser step", unit="prompts", at_least=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        f"${{{ACTOR}.ppo_micro_batch_size_per_gpu}}",
        "rows per forward-backward pass",
        unit="rows",
        at_least=1,
        only_if=BY_ROWS.format("use_dynamic_bsz"),
    )
    use_dynamic_bsz: bool | None = key(f"${{{ACTOR}.use_dynamic_bsz}}", "see actor.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int | str = budget_of_a_pass(
        BY_TOKENS.format("use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"), "token budget of a micro-batch"
    )
    ppo_epochs: int = key(f"${{{ACTOR}.ppo_epochs}}", "passes over a step's rows", unit="epochs", at_least=1)
    shuffle: bool = key(f"${{{ACTOR}.shuffle}}", "redraw the mini-batches in every pass")
    cliprange_value: float = key(0.5, "clip range of the value around its old value", at_least=1e-6)
    loss_agg_mode: str | None = key(
        f"${{{ACTOR}.loss_agg_mode}}",
        "how token losses become one number; null: token-mean",
        choices=LOSS_AGGREGATIONS,
    )
    grad_clip: float = key(1.0, "largest norm of the gradient", at_least=1e-6)
    optim: OptimConfig = section(partial(OptimConfig, lr=1e-5), "optimiser")
    ulysses_sequence_parallel_size: int = shared_sequences()
    fsdp_config: FSDPConfig = section(FSDPConfig, "sharding")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")


@dataclass
class RewardModelConfig:
    enable: bool = key(False, "score with a reward model too")
    model: RewardModelPathConfig = section(
        RewardModelPathConfig, "sequence-classification model with one label", only_if=".enable=True"
    )
    micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward pass; null: token budget", unit="rows", at_least=1, only_if=".enable=True"
    )
    max_token_len_per_gpu: int | str = budget_of_a_pass(".enable=True and .micro_batch_size_per_gpu=null")
    enable_resource_pool: bool = key(False, "a pool of its own instead of the shared one", only_if=".enable=True")
    n_gpus_per_node: int = key(
        1,
        "slots per node of that pool",
        unit="slots",
        at_least=1,
        at_most=MOST_PROCESSES,
        only_if=".enable_resource_pool=True",
    )
    nnodes: int = key(
        1,
        "nodes of that pool",
        unit="nodes",
        at_least=1,
        at_most=MOST_PROCESSES,
        only_if=".enable_resource_pool=True",
    )
    reward_manager: str = key("naive", "turns scores into rewards", choices=REWARD_MANAGERS, own="module:class")
    reward_kwargs: dict[str, Any] = key({}, "extra arguments of the manager, e.g. overlong_buffer_cfg")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")
