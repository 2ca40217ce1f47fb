"""Policy losses that keep the policy near the one that sampled by other means than PPO's clip.

The conventions, and what every argument is, are in `policy_losses`. P = exp(log_prob), Q = exp(old_log_prob),
d = log_prob − old_log_prob. Where a formula has sg (stop-gradient), the value and the gradient tell different things: the
gradient is the meant one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quadriga.algorithms.aggregate import Aggregation
from quadriga.algorithms.masked import LOG_RATIO_BOUND, as_bool, masked_sum
from quadriga.algorithms.policy_losses import (
    LossAndMetrics,
    clip_range,
    log_ratio_of,
    register_policy_loss,
    row_mean,
    weighted,
)
from quadriga.errors import ConfigError

COVARIANCE_LOSSES = ("clip_cov", "kl_cov")
KEYS = "actor_rollout_ref.actor.policy_loss"
VESPO_SMALLEST_WEIGHT = 1e-8
PROBABILITY_EPS = 1e-8


@register_policy_loss("sapo")
def sapo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """SAPO (Soft Adaptive Policy Optimization, arXiv 2511.20347): a soft gate in the clip's place.

    ℓ = −A · (4/τ) · sigmoid(τ(ρ − 1)), τ = `tau_pos` for A > 0, else `tau_neg`. The gradient −A·ρ·sech²(τ(ρ−1)/2) is the
    policy gradient at ρ = 1 and fades on both sides instead of stopping at an edge.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ConfigError(
            f"{KEYS}.tau_pos={tau_pos} and tau_neg={tau_neg} must be positive.", "set them to 1.0 and 1.05"
        )
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    tau = torch.full_like(advantages, tau_neg).masked_fill_(advantages > 0, tau_pos)
    per_token = -advantages * (4 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@register_policy_loss("dppo_tv")
def dppo_tv(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """DPPO with total variation (arXiv 2602.04879): −A · sg[min(ρ, c)] · sg[keep] · log_prob.

    keep: P − Q ≤ high for A > 0, P − Q ≥ −low otherwise. low and high are differences of probabilities, not of ratios:
    a rare token may become ten times likelier, a likely one may not change much.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask).detach()
    moved = log_prob.detach().exp() - old_log_prob.exp()
    keep = torch.where(advantages > 0, moved <= high, moved >= -low)
    return _kept_policy_gradient(
        log_prob, log_ratio, advantages, keep, response_mask, loss_agg, clip_ratio_c, rollout_is_weights
    )


@register_policy_loss("dppo_kl")
def dppo_kl(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 20.0,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """DPPO with the binary KL (arXiv 2602.04879): as `dppo_tv`, with another measure of the distance.

    D = Q·(old − log_prob) + (1−Q)·log((1−Q+1e-8)/(1−P+1e-8)), the KL between "this token" and "any other" before and
    after. keep: D ≤ high or P ≤ Q for A > 0; D ≤ low or P ≥ Q otherwise: moving back towards old is never masked.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask).detach()
    now, before = log_prob.detach().exp(), old_log_prob.exp()
    # Not the clamped log-ratio: a distance that is cut off would keep what must be masked.
    rest = torch.log((1 - before + PROBABILITY_EPS) / (1 - now + PROBABILITY_EPS))
    distance = before * (old_log_prob - log_prob.detach()) + (1 - before) * rest
    keep = torch.where(advantages > 0, (distance <= high) | (now <= before), (distance <= low) | (now >= before))
    return _kept_policy_gradient(
        log_prob, log_ratio, advantages, keep, response_mask, loss_agg, clip_ratio_c, rollout_is_weights
    )


def _kept_policy_gradient(
    log_prob: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    keep: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    cap: float,
    rollout_is_weights: Tensor | None,
) -> LossAndMetrics:
    """−A · min(ρ, cap) · keep · log_prob with constant factors; masked tokens stay in the divisor."""
    if not cap > 1:
        raise ConfigError(f"actor_rollout_ref.actor.clip_ratio_c is {cap}; it bounds a ratio above 1.", "set it to 20")
    ratio = log_ratio.exp()
    factor = ratio.clamp(max=cap) * keep
    per_token = -advantages * factor * torch.where(as_bool(response_mask), log_prob, 0)
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean((~keep).to(ratio.dtype), response_mask),
        "actor/pg_clipfrac_lower": loss_agg.token_mean((keep & (ratio > cap)).to(ratio.dtype), response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@register_policy_loss("prime_rl")
def prime_rl(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    prime_advantage_weight: float = 1.0,
    prime_kl_coef: float = 1e-3,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """prime-rl's default loss (INTELLECT-3, arXiv 2512.16144, with the mask of DPPO): −keep·τ·A·ρ + κ·d².

    keep as in `dppo_tv`; τ = `prime_advantage_weight`, κ = `prime_kl_coef`. old is the policy that sampled (μ), so the run
    needs `algorithm.rollout_correction.bypass_mode`. The gradient goes through ρ, which is neither clipped nor clamped
    below ±20 in the exponent; κ·d² holds masked tokens too and pulls them back.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    selected = as_bool(response_mask)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    unclamped = torch.where(selected, log_prob - old_log_prob, 0)
    moved = log_prob.detach().exp() - old_log_prob.exp()
    too_high, too_low = (advantages > 0) & (moved > high), (advantages <= 0) & (moved < -low)
    keep = ~(too_high | too_low)
    pull = -keep.to(log_ratio.dtype) * prime_advantage_weight * advantages * log_ratio.exp()
    per_token = pull + prime_kl_coef * unclamped.square()
    k3 = (torch.expm1(log_ratio) - log_ratio).detach()
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean((~keep).to(k3.dtype), response_mask),
        "actor/masked_high": loss_agg.token_mean(too_high.to(k3.dtype), response_mask),
        "actor/masked_low": loss_agg.token_mean(too_low.to(k3.dtype), response_mask),
        "actor/k3_masked": loss_agg.token_mean(k3 * ~keep, response_mask),
        "actor/k3_kept": loss_agg.token_mean(k3 * keep, response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@register_policy_loss("dro")
def dro(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    dro_beta: float | None = None,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """DRO's direct objective (Richemond et al. 2024, arXiv 2405.19107) by the token: ℓ = −(A·log_prob − β/2 · d²).

    No ratio and no clip: the square pulls back to the old policy from any distance, and d = A/β is where it rests.
    """
    if dro_beta is None or not dro_beta > 0:
        raise ConfigError(f"The loss dro needs {KEYS}.dro_beta above 0 (it is {dro_beta}).", "set it, e.g. to 0.1")
    current = torch.where(as_bool(response_mask), log_prob, 0)
    difference = torch.where(as_bool(response_mask), log_prob - old_log_prob, 0)
    per_token = -(advantages * current - dro_beta / 2 * difference.square())
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/ppo_kl": loss_agg.token_mean(-difference, response_mask),
    }


@register_policy_loss("luspo")
def luspo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    clip_ratio_low: float = 2e-3,
    clip_ratio_high: float = 2.5e-3,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """LUSPO (Length-Unbiased Sequence Policy Optimization, arXiv 2602.05261).

    A row's loss is len_i · max(−A_i r, −A_i·clip(r, 1−low, 1+high)), r = exp(row mean of d) with its full gradient; the
    mean over rows is taken of that, so long rows are not diluted as in GSPO. Here the row's value is on each of its tokens
    and the default aggregation, seq-mean-token-sum, is what multiplies by len_i. A_i is the row's mean advantage.
    """
    low, high = clip_range(clip_ratio_low, clip_ratio_low, clip_ratio_high)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    ratio = row_mean(log_ratio, response_mask).exp()
    advantage = row_mean(advantages, response_mask)
    plain, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
    per_token = torch.maximum(plain, clipped).expand_as(log_ratio)
    was_clipped = (clipped > plain).to(ratio.dtype).expand_as(log_ratio)
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean(was_clipped, response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@register_policy_loss("vespo")
def vespo(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """VESPO (Variational Sequence-level Soft Policy Optimization, arXiv 2602.10693): −sg[φ]·A·log_prob.

    s = clamp(Σ_t clamp(d, ±20), ln 1e-8, 20) over the row, W = e^s, φ = exp(λ + k·s − λW), which is 1 at W = 1 and falls on
    both sides; k, λ are those of `_pos` for A ≥ 0, else of `_neg`. Rollout weights w are part of the row's weight: Σ log w
    is added to s, and they are no factor of the loss. A φ that is not finite counts as 0.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask).detach()
    total = log_ratio
    if rollout_is_weights is not None:
        total = total + torch.where(as_bool(response_mask), rollout_is_weights.detach(), 1).log()
    lowest = math.log(VESPO_SMALLEST_WEIGHT)
    s = masked_sum(total, response_mask, dim=-1).clamp(lowest, LOG_RATIO_BOUND).unsqueeze(-1)
    good = advantages >= 0
    k = torch.full_like(advantages, vespo_k_neg).masked_fill_(good, vespo_k_pos)
    strength = torch.full_like(advantages, vespo_lambda_neg).masked_fill_(good, vespo_lambda_pos)
    phi = torch.exp(strength + k * s - strength * s.exp())
    phi = torch.where(phi.isfinite(), phi, 0)
    per_token = -phi * advantages * torch.where(as_bool(response_mask), log_prob, 0)
    return loss_agg(per_token, response_mask), {
        "actor/vespo_weight": loss_agg.token_mean(phi, response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@register_policy_loss("clip_cov")
def clip_cov(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    cov_selected: Tensor,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617): PPO's max(−Aρ, −A·clip(ρ, 1−low, 1+high)) without dual clip,
    times 0 on the tokens that `token_choice.select_by_covariance` has chosen from the whole mini-batch.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    ratio = log_ratio.exp()
    per_token = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    per_token = per_token.masked_fill(as_bool(cov_selected), 0)
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean(as_bool(cov_selected).to(ratio.dtype), response_mask),
        "actor/ppo_kl": loss_agg.token_mean(-log_ratio, response_mask),
    }


@register_policy_loss("kl_cov")
def kl_cov(
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    cov_selected: Tensor,
    ppo_kl_coef: float = 0.1,
    rollout_is_weights: Tensor | None = None,
) -> LossAndMetrics:
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): −Aρ, plus `ppo_kl_coef`·|d| on the tokens that
    `token_choice.select_by_covariance` has chosen from the whole mini-batch. Nothing is clipped. `actor/ppo_kl` is mean |d|.
    """
    log_ratio = log_ratio_of(log_prob, old_log_prob, response_mask)
    penalty = ppo_kl_coef * log_ratio.abs() * as_bool(cov_selected)
    per_token = -advantages * log_ratio.exp() + penalty
    return loss_agg(weighted(per_token, rollout_is_weights), response_mask), {
        "actor/pg_clipfrac": loss_agg.token_mean(as_bool(cov_selected).to(log_ratio.dtype), response_mask),
        "actor/ppo_kl": loss_agg.token_mean(log_ratio.abs(), response_mask),
    }
