"""Names that a key may take where the user can add to them: estimators, losses, KL estimators, managers, sinks.

The configuration must be able to refuse a misspelt name before anything heavy is imported, so the built-in names are
listed here; tests hold the lists equal to the registries of the rooms that implement them.
"""

from __future__ import annotations

TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
"""They need Σπ² of the policy at every token."""

GROUP_ESTIMATORS = (
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "grpo_passk",
    "gpg",
    "gdpo",
    "gigpo",
    *TOKEN_BASELINES,
)
"""They compare a response with the others to the same prompt: a lone response has advantage 0."""

ADV_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_vectorized",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "grpo_passk",
    "gpg",
    "gdpo",
    "gigpo",
    *TOKEN_BASELINES,
)
DIVIDED_BY_DEVIATION = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "gigpo")
"""They can divide by the deviation of the group's scores."""

COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
"""They treat tokens that were chosen from the whole mini-batch in a way of their own."""

POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "cispo",
    "gpg",
    "geo_mean",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "luspo",
    "vespo",
    *COVARIANCE_LOSSES,
    "prime_rl",
    "decoupled",
)
CLIPPING_LOSSES = ("vanilla", "gspo", "cispo", "geo_mean", "sapo", "luspo")
"""Their ratio to the old policy is a weight, and they bound it."""

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_LOSSES = KL_ESTIMATORS + tuple(f"{name}+" for name in KL_ESTIMATORS)
DISTILLATION_LOSSES = (*KL_LOSSES, "forward_kl_topk", "jsd_topk")
DISTILLATION_TAILS = ("bucket", "dropped", "renormalised")
LENGTH_REWARDS = ("kimi", "prime_rl")
PF_PPO_METHODS = ("pow", "max_min", "max_random")
LOSS_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")
DPO_LOSSES = ("sigmoid", "ipo")
REWARD_MANAGERS = ("naive", "dapo", "batch", "rate_limited", "judge")
OPTIMISERS = ("adamw", "adamw_8bit", "adamw_bf16", "muon")
METRIC_SINKS = ("console", "tensorboard", "wandb", "mlflow")
