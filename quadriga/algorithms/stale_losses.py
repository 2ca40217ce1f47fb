"""The loss for samples of an older policy than the one that learns.

μ (`rollout_log_prob`) are the log-probs of the policy that sampled, π_prox those of the policy at the start of the step
(`old_log_prob`), π the policy as it is being updated. `token_versions[B, T]` says which version wrote each token, and
`version` v is the version that this update makes: tokens of version v − 1 are on-policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.aggregate import Aggregation
from quadriga.algorithms.policy_losses import (
    LossAndMetrics,
    clip_range,
    log_ratio_of,
    register_policy_loss,
    row_mean,
    weighted,
)
from quadriga.errors import ConfigError, DataError

KEYS = "actor_rollout_ref.actor.policy_loss"
BEHAVIOUR_LEVELS = ("token", "sequence")
BEHAVIOUR_BOUNDS = ("mask", "clamp")
PROXIMAL_POLICIES = ("recomputed", "loglinear")


@register_policy_loss("decoupled")
def decoupled(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    behaviour_level: str = "token",
    behaviour_cap: float = 5.0,
    behaviour_bound: str = "mask",
    proximal: str = "recomputed",
    token_versions: Tensor | None = None,
    version: int | None = None,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """Decoupled PPO (Fu et al. 2025, AReaL, arXiv 2505.24298): sg[w] · max(−Ar, −A·clip(r, 1−low, 1+high)).

    r = exp(log_prob − prox) is clipped around the proximal policy, w = exp(prox − μ) corrects for who sampled: by token,
    or the row's geometric mean. w above `behaviour_cap` is masked (weight 0; such tokens stay in the divisor) or clamped
    to it. prox: the policy at the step's start, or `loglinear_proximal` (A-3PO), which needs no pass of its own.
    """
    _one_of("behaviour_level", behaviour_level, BEHAVIOUR_LEVELS)
    _one_of("behaviour_bound", behaviour_bound, BEHAVIOUR_BOUNDS)
    _one_of("proximal", proximal, PROXIMAL_POLICIES)
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    if proximal == "loglinear":
        old_log_prob = loglinear_proximal(log_prob, rollout_log_prob, token_versions, version)
    log_weight = log_ratio_of(old_log_prob, rollout_log_prob, response_mask)
    if behaviour_level == "sequence":
        log_weight = row_mean(log_weight, response_mask).expand_as(log_weight)
    weight = log_weight.exp()
    outside = weight > behaviour_cap
    weight = weight.masked_fill(outside, 0) if behaviour_bound == "mask" else weight.clamp(max=behaviour_cap)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    per_token = weight.detach() * torch.maximum(plain, clipped)
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean((clipped > plain).to(ratio.dtype), response_mask),
        "actor/behaviour_weight": loss_agg.token_mean(weight, response_mask),
        "actor/behaviour_outside": loss_agg.token_mean(outside.to(ratio.dtype), response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@torch.no_grad()
def loglinear_proximal(
    log_prob: Tensor, rollout_log_prob: Tensor, token_versions: Tensor | None, version: int | None
) -> Tensor:
    """A-3PO (arXiv 2512.06547): log π_prox ≈ μ + α(log_prob − μ) by the token, without gradient.

    α = clamp((v − 1 − v_b)/(v − v_b), 0, 1) for a token of version v_b, 0 where v_b ≥ v: for v_b = v − 1 the proximal policy
    is the one that sampled, and the older the token, the nearer it is to the policy of now.
    """
    if token_versions is None or version is None:
        raise DataError(
            f"{KEYS}.proximal=loglinear needs the version of every token.",
            "set it to recomputed, or give token_versions and version",
        )
    behind = (version - token_versions).to(log_prob.dtype)
    alpha = torch.where(behind > 0, (behind - 1) / behind.clamp(min=1), 0).clamp(0, 1)
    return rollout_log_prob + alpha * (log_prob.detach() - rollout_log_prob)


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{KEYS}.{key}={value!r} is unknown.", f"set it to {' or '.join(known)}")
