"""Policy losses: from log-probs and advantages to the number that is minimised.

Every loss is a pure function with keyword arguments that returns `(loss, metrics)`: a scalar, and a dict of scalars
without gradient. Both are these rows' share of the mini-batch, normalised by `loss_agg`, so that summing over
micro-batches and ranks gives the mini-batch's value. It takes those of the following that it needs (padded `[B, T]`,
not packed; what lies under a zero of the mask is never read and gets gradient 0):

- `log_prob` (with gradient), `old_log_prob`, `advantages`, `response_mask`: `[B, T]`;
- `loss_agg`: the `Aggregation`, always honoured;
- `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`: `low` and `high` are `clip_ratio` unless they are given;
- `clip_ratio_c`: the dual clip's bound;
- `rollout_is_weights[B, T]`: importance weights of the rollout correction, constants that multiply the token's loss;
- `rollout_log_prob[B, T]`: log-probs μ of the policy that sampled, `token_versions[B, T]` its versions, and `version`, that
  of the policy which this update makes;
- `cov_selected[B, T]`: the tokens that `token_choice.select_by_covariance` chose;
- whatever else `actor.policy_loss` has a key for.

This file has PPO's clip and its nearest relatives; `trust_region_losses` and `stale_losses` have the
others. Throughout ρ_t = exp(clamp(log_prob − old_log_prob, ±20)), A the advantage, sg stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.aggregate import Aggregation
from quadriga.algorithms.masked import GSPO_LOG_RATIO_BOUND, LOG_RATIO_BOUND, as_bool, masked_sum, token_counts
from quadriga.errors import ConfigError, DataError
from quadriga.registry import Registry

SMALLEST_WEIGHT = 1e-10
"""As what a rollout weight of 0 counts in a geometric mean."""
_BY_TOKEN = (
    "response_mask",
    "old_log_prob",
    "advantages",
    "rollout_is_weights",
    "rollout_log_prob",
    "token_versions",
    "cov_selected",
)
LossAndMetrics = tuple[Tensor, dict[str, Tensor]]

_LOSSES: Registry[Callable[..., LossAndMetrics]] = Registry(
    "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode"
)
register_policy_loss = _LOSSES.register
get_policy_loss = _LOSSES.get
policy_loss_names = _LOSSES.names


def compute_policy_loss(name: str, *, log_prob: Tensor, response_mask: Tensor, **inputs: Any) -> LossAndMetrics:
    """Loss and metrics by the policy loss `name`, after checking the shapes (see the module's docstring).

    A loss is called with the inputs it declares; those that are None count as not given.

    Raises:
        ConfigError: unknown name, or an input that the loss needs is missing.
        DataError: shapes do not fit.
    """
    inputs |= {"log_prob": log_prob, "response_mask": response_mask}
    for key in _BY_TOKEN:
        given = inputs.get(key)
        if given is not None and given.shape != log_prob.shape:
            raise DataError(
                f"{key} has shape {tuple(given.shape)}, but log_prob has {tuple(log_prob.shape)}.",
                "give [rows, tokens] for both",
            )
    result = _LOSSES.call(name, inputs)
    if not (isinstance(result, tuple) and len(result) == 2 and getattr(result[0], "ndim", None) == 0):
        raise DataError(f"The policy loss {name!r} did not return a scalar and metrics.", "return (loss, metrics)")
    return result


@register_policy_loss("vanilla")
def vanilla(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """PPO's clip (Schulman et al. 2017, arXiv 1707.06347) with the dual clip (Ye et al. 2019, arXiv 1912.09729).

    ℓ = max(−Aρ, −A·clip(ρ, 1−low, 1+high)), and for A < 0 at most −A·c: a token that was bad and became likelier by far
    would otherwise pull without bound. low ≠ high is DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476).
    """
    if not clip_ratio_c > 1:
        raise ConfigError(
            f"actor_rollout_ref.actor.clip_ratio_c is {clip_ratio_c}; it bounds a ratio above 1.",
            "set it above 1, say 3.0",
        )
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    ratio = log_ratio.exp()
    plain, clipped, bound = (
        -advantages * ratio,
        -advantages * ratio.clamp(1 - low, 1 + high),
        -advantages * clip_ratio_c,
    )
    ppo = torch.maximum(plain, clipped)
    bad = advantages < 0
    per_token = torch.where(bad, torch.minimum(ppo, bound), ppo)
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean((clipped > plain).to(ratio.dtype), response_mask),
        "actor/pg_clipfrac_lower": loss_agg.token_mean((bad & (ppo > bound)).to(ratio.dtype), response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@register_policy_loss("gspo")
def gspo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """GSPO in its token form (Zheng et al. 2025, Group Sequence Policy Optimization, arXiv 2507.18071).

    ρ_i = exp(mean over the row's tokens of log_prob − old_log_prob),   s_t = sg[ρ_i] · exp(log_prob − sg[log_prob]),
    ℓ = max(−A s, −A·clip(s, 1−low, 1+high)). The value is the sequence's, the gradient goes through the token. There is
    no dual clip here, so log s is at most 10: a bad row that became likelier by far would pull without bound.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    current = torch.where(as_bool(response_mask), log_prob, 0)
    mean_log_ratio = row_mean(current.detach() - old_log_prob, response_mask)
    ratio = (mean_log_ratio + (current - current.detach())).clamp(-LOG_RATIO_BOUND, GSPO_LOG_RATIO_BOUND).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    per_token = torch.maximum(plain, clipped)
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean((clipped > plain).to(ratio.dtype), response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio_of(log_prob, old_log_prob, response_mask), response_mask),
    }


@register_policy_loss("cispo")
def cispo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """CISPO (MiniMax 2025, MiniMax-M1, arXiv 2506.13585): ℓ = −sg[clip(ρ, 1−low, 1+high)] · A · log_prob.

    The importance weight is clipped, not the objective: every token keeps a gradient.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - low, 1 + high)
    per_token = -weight * advantages * torch.where(as_bool(response_mask), log_prob, 0)
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean((weight != ratio).to(ratio.dtype), response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@register_policy_loss("gpg")
def gpg(
    *,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """GPG (Chu et al. 2025, Group Policy Gradient, arXiv 2504.02546): the plain policy gradient, ℓ = −A · log_prob."""
    per_token = -advantages * torch.where(as_bool(response_mask), log_prob, 0)
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {}


@register_policy_loss("geo_mean")
def geo_mean(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """GMPO (Zhao et al. 2025, Geometric-Mean Policy Optimization, arXiv 2507.20673).

    ℓ_i = −A_i · (Π_t κ_t)^(1/len_i), on each of the row's tokens; A_i is the row's mean advantage. Each token's ratio
    is clipped on one side, in log space: log κ = min(log ρ, high) for A_i > 0, max(log ρ, −low) otherwise. Rollout weights
    count by their geometric mean over the row.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    advantage = row_mean(advantages, response_mask)
    clipped = torch.where(advantage > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    per_row = -advantage * row_mean(clipped, response_mask).exp()
    if rollout_is_weights is not None:
        log_weight = rollout_is_weights.detach().clamp(min=SMALLEST_WEIGHT).log()
        per_row = per_row * row_mean(log_weight, response_mask).exp()
    return loss_agg(per_row.expand_as(log_ratio), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean((clipped != log_ratio).to(log_ratio.dtype), response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


def clip_range(clip_ratio: float, low: float | None, high: float | None) -> tuple[float, float]:
    low, high = clip_ratio if low is None else low, clip_ratio if high is None else high
    if not (low >= 0 and high >= 0):
        raise ConfigError(
            f"The clip range [1 − {low}, 1 + {high}] does not contain 1.",
            "set actor_rollout_ref.actor.clip_ratio, clip_ratio_low and clip_ratio_high to numbers ≥ 0",
        )
    return low, high


def log_ratio_of(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """log ρ, within ±20, and 0 where the mask is 0."""
    return torch.where(as_bool(mask), log_prob - old_log_prob, 0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's tokens, `[B, 1]`; 0 for a row without any."""
    return masked_sum(x, mask, dim=-1).div(token_counts(mask).clamp(min=1)).unsqueeze(-1)


def weighted(per_token: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    return per_token if rollout_is_weights is None else per_token * rollout_is_weights.detach()
