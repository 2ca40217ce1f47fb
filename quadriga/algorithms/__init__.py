"""The mathematics of Quadriga: pure functions on tensors. `docs/algorithms.md` has the formulas on one page."""

from __future__ import annotations

from quadriga.algorithms import (  # noqa: F401  (they register what they have)
    composed_advantages,
    stale_losses,
    token_baselines,
    trust_region_losses,
)
from quadriga.algorithms.advantages import (
    adv_estimator_names,
    compute_advantage,
    get_adv_estimator,
    register_adv_est,
)
from quadriga.algorithms.aggregate import (
    AGGREGATION_MODES,
    Aggregation,
    count_tokens_and_sequences,
    default_agg_mode,
    entropy_bonus,
)
from quadriga.algorithms.correction import (
    RolloutCorrection,
    correct_rollout,
    effective_sample_size,
    mismatch_metrics,
    staleness_metrics,
)
from quadriga.algorithms.groups import group_ids_from_uids
from quadriga.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    KLController,
    apply_kl_penalty,
    kl_estimate,
    kl_estimator_names,
    kl_loss,
    make_kl_controller,
    register_kl_estimator,
)
from quadriga.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from quadriga.algorithms.policy_losses import (
    compute_policy_loss,
    get_policy_loss,
    policy_loss_names,
    register_policy_loss,
)
from quadriga.algorithms.value_losses import DPO_LOSSES, dpo_loss, pairwise_reward_loss, value_loss
from quadriga.registry import Registry

__all__ = [
    "AGGREGATION_MODES",
    "DPO_LOSSES",
    "AdaptiveKLController",
    "Aggregation",
    "FixedKLController",
    "KLController",
    "Registry",
    "RolloutCorrection",
    "adv_estimator_names",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_policy_loss",
    "correct_rollout",
    "count_tokens_and_sequences",
    "default_agg_mode",
    "dpo_loss",
    "effective_sample_size",
    "entropy_bonus",
    "get_adv_estimator",
    "get_policy_loss",
    "group_ids_from_uids",
    "kl_estimate",
    "kl_estimator_names",
    "kl_loss",
    "make_kl_controller",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "mismatch_metrics",
    "pairwise_reward_loss",
    "policy_loss_names",
    "register_adv_est",
    "register_kl_estimator",
    "register_policy_loss",
    "staleness_metrics",
    "value_loss",
]
