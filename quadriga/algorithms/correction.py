"""Rollout correction: what to do about the gap between the engine that sampled and the model that learns.

μ are the log-probs of the sampled tokens as the rollout engine reported them, π the trainer's for the same tokens
(old log-probs), both `[B, T]`; d = π − μ. Nothing here carries a gradient.

- **Importance weights** (`rollout_is`): exp(d) per `token`, or exp(Σ_t d) per `sequence` on each of the row's tokens.
  `rollout_is_threshold` C truncates them, min(w, C) (TIS; Yao et al. 2025, Your Efficient RL Framework Secretly Brings
  You Off-Policy RL Training); `"lo_hi"` sets those outside [lo, hi] to 0 instead (IcePop; Ling team 2025).
- **Rejection** (`rollout_rs`): names `scope_statistic`, several with commas, all of which must hold. The statistic is
  `k1` d, `k2` d²/2 or `k3` exp(d) − d − 1, its scope `token`, `seq_sum`, `seq_mean` or `seq_max`; what is outside the
  bounds leaves the mask, be it a token or the whole sequence. `rollout_rs_threshold` has one entry for each name or
  one for all: for k1 `"lo_hi"` bounds of the ratio exp(·), a single C meaning [1/C, C]; for k2 and k3 an upper bound.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quadriga.algorithms.bounds import LOG_RATIO_BOUND
from quadriga.algorithms.masked import as_bool, masked_mean, masked_sum, token_counts
from quadriga.errors import ConfigError

REJECTION_SCOPES = ("token", "seq_sum", "seq_mean", "seq_max")
REJECTION_STATISTICS = ("k1", "k2", "k3")


class RolloutCorrection(NamedTuple):
    """What the correction decided.

    Attributes:
        weights: `[B, T]` for the policy loss's `rollout_is_weights`, 0 off the mask; None without `rollout_is`.
        mask: `[B, T]` booleans, the response mask without what was rejected; the loss takes its counts from this one.
        metrics: scalars of the whole batch, `rollout_corr/*` and `training/*`.
    """

    weights: Tensor | None
    mask: Tensor
    metrics: dict[str, Tensor]


@torch.no_grad()
def correct_rollout(
    *,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> RolloutCorrection:
    """Weights, mask and metrics for a batch, by the keys of `algorithm.rollout_correction`; see the module's docstring.

    `rollout_is_batch_normalize` divides the weights by their mean over the tokens kept. Metrics, besides those of
    `mismatch_metrics`: `rollout_corr/is_mean` (before that division) and `rollout_corr/ess` of the weights in use,
    `rollout_corr/is_clipped_fraction` (tokens outside the bounds), `rollout_corr/masked_fraction` and
    `rollout_corr/seq_masked_fraction` (tokens and rows that no longer contribute).
    """
    mask = as_bool(response_mask)
    metrics = mismatch_metrics(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=mask)
    d = torch.where(mask, old_log_prob - rollout_log_prob, 0)
    kept = mask if rollout_rs is None else mask & _accepted(d, mask, rollout_rs, rollout_rs_threshold)
    weights = None
    contributes = kept
    if rollout_is is not None:
        weights, clipped = importance_weights(d, kept, rollout_is, rollout_is_threshold)
        mean = masked_sum(weights, kept) / kept.sum().clamp(min=1)
        if rollout_is_batch_normalize:
            weights = weights / mean.clamp(min=torch.finfo(mean.dtype).tiny)
        metrics["rollout_corr/is_mean"] = mean
        metrics["rollout_corr/is_clipped_fraction"] = masked_mean(clipped.to(d.dtype), mask)
        metrics["rollout_corr/ess"] = effective_sample_size(weights, kept)
        contributes = kept & (weights > 0)
    metrics["rollout_corr/masked_fraction"] = masked_mean((~contributes).to(d.dtype), mask)
    had_tokens = mask.any(-1)
    metrics["rollout_corr/seq_masked_fraction"] = masked_mean((~contributes.any(-1)).to(d.dtype), had_tokens)
    return RolloutCorrection(weights, kept, metrics)


def importance_weights(d: Tensor, mask: Tensor, level: str, threshold: float | str) -> tuple[Tensor, Tensor]:
    """Importance weights `[B, T]` from log-ratios `d[B, T]` (0 off the mask), and where they were outside the bounds.

    `level` is "token" or "sequence"; `threshold` is C (truncate: min(w, C)) or "lo_hi" (zero outside [lo, hi]).
    """
    if level not in ("token", "sequence"):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={level!r} is unknown.", "set it to token, sequence or null"
        )
    log_weight = d if level == "token" else d.sum(-1, keepdim=True).expand_as(d)
    weights = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    lower, upper = _parse_bounds(threshold, "rollout_is_threshold")
    outside = weights > upper
    if lower is not None:
        outside = outside | (weights < lower)
        weights = weights.masked_fill(outside, 0)
    return torch.where(mask, weights.clamp(max=upper), 0), outside & mask


@torch.no_grad()
def mismatch_metrics(*, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """How far rollout and trainer are apart, over the whole batch `[B, T]`; all are at their ideal when μ = π.

    `rollout_corr/kl` mean of −d, `rollout_corr/k3_kl` mean of exp(d) − d − 1 (both estimate KL(μ ‖ π), ideal 0);
    `rollout_corr/chi2_token`, `chi2_seq` mean of exp(d)² − 1, of tokens and of sequences (ideal 0);
    `rollout_corr/ess` effective sample size (Σw)² / (n Σw²) of w = exp(d) over tokens (ideal 1);
    `rollout_corr/training_ppl`, `rollout_ppl` exp of the mean negative log-prob over tokens;
    `training/rollout_probs_diff_mean`, `_max` of |exp π − exp μ| over tokens.
    """
    mask = as_bool(response_mask)
    trainer, rollout = torch.where(mask, old_log_prob, 0), torch.where(mask, rollout_log_prob, 0)
    d = (trainer - rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = d.exp()
    sequence_ratio = (trainer - rollout).sum(-1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    difference = (trainer.exp() - rollout.exp()).abs()
    return {
        "rollout_corr/kl": masked_mean(-d, mask),
        "rollout_corr/k3_kl": masked_mean(torch.expm1(d) - d, mask),
        "rollout_corr/chi2_token": masked_mean(ratio.square(), mask) - 1,
        "rollout_corr/chi2_seq": masked_mean(sequence_ratio.square(), mask.any(-1)) - 1,
        "rollout_corr/ess": effective_sample_size(ratio, mask),
        "rollout_corr/training_ppl": (-masked_mean(trainer, mask)).clamp(max=LOG_RATIO_BOUND).exp(),
        "rollout_corr/rollout_ppl": (-masked_mean(rollout, mask)).clamp(max=LOG_RATIO_BOUND).exp(),
        "training/rollout_probs_diff_mean": masked_mean(difference, mask),
        "training/rollout_probs_diff_max": difference.max(),
    }


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(Σw)² / (n Σw²) over the mask, in [0, 1]: the share of the samples that a weighted mean is worth."""
    total, squares = masked_sum(weights, mask), masked_sum(weights.square(), mask)
    return total.square() / (as_bool(mask).sum() * squares).clamp(min=torch.finfo(weights.dtype).tiny)


def _accepted(d: Tensor, mask: Tensor, tests: str, thresholds: float | str | None) -> Tensor:
    """Where every one of the comma-separated tests holds; `[B, T]`, or `[B, 1]` for sequence tests alone."""
    if thresholds is None:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_rs={tests!r} needs bounds.",
            'set algorithm.rollout_correction.rollout_rs_threshold, say "0.5_2.0" for k1 or 0.01 for k2 and k3',
        )
    names = [name.strip() for name in tests.split(",")]
    bounds = [bound.strip() for bound in str(thresholds).split(",")]
    if len(bounds) == 1:
        bounds *= len(names)
    if len(bounds) != len(names):
        raise ConfigError(
            f"rollout_rs has {len(names)} tests, rollout_rs_threshold {len(bounds)} bounds.",
            "give one for each, or one",
        )
    accepted = torch.ones_like(mask)
    for name, bound in zip(names, bounds):
        accepted &= _passes(d, mask, name, bound)
    return accepted


def _passes(d: Tensor, mask: Tensor, test: str, bound: str) -> Tensor:
    """Where one rejection test holds, `[B, T]` or `[B, 1]`, for log-ratios `d` that are 0 off the mask."""
    scope, _, statistic = test.rpartition("_")
    if scope not in REJECTION_SCOPES or statistic not in REJECTION_STATISTICS:
        known = ", ".join(f"{scope}_{statistic}" for scope in REJECTION_SCOPES for statistic in REJECTION_STATISTICS)
        raise ConfigError(
            f"Unknown rejection {test!r}. Known: {known}.", "set algorithm.rollout_correction.rollout_rs to such names"
        )
    lower, upper = _parse_bounds(bound, "rollout_rs_threshold")
    if statistic != "k1":
        if lower is not None:
            raise ConfigError(
                f"{test} is a divergence and has no lower bound ({bound!r}).", "give the upper bound alone"
            )
        safe = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        divergence = d.square() / 2 if statistic == "k2" else torch.expm1(safe) - safe
        return _over_scope(divergence, mask, scope, "amax") <= upper
    lower = 1 / upper if lower is None else lower
    return (_over_scope(d, mask, scope, "amax") <= math.log(upper)) & (
        _over_scope(d, mask, scope, "amin") >= math.log(lower)
    )


def _over_scope(x: Tensor, mask: Tensor, scope: str, extreme: str) -> Tensor:
    """x by token, or its sum, mean or extreme (`amax`, `amin`) over each row `[B, 1]`; 0 off the mask."""
    if scope == "token":
        return x
    if scope == "seq_max":
        never_extreme = -math.inf if extreme == "amax" else math.inf
        return getattr(x.masked_fill(~mask, never_extreme), extreme)(-1, keepdim=True)
    total = x.sum(-1, keepdim=True)
    return total if scope == "seq_sum" else total / token_counts(mask).clamp(min=1).unsqueeze(-1)


def _parse_bounds(threshold: float | str, key: str) -> tuple[float | None, float]:
    """2.0 or "2.0" → (None, 2.0); "0.5_2.0" → (0.5, 2.0)."""
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        numbers = []
    if not (1 <= len(numbers) <= 2 and 0 < numbers[-1] < math.inf and 0 < numbers[0] <= numbers[-1]):
        raise ConfigError(
            f"algorithm.rollout_correction.{key}={threshold!r} is neither a positive number nor 'lower_upper'.",
            'give a number such as 2.0, or two such as "0.5_2.0"',
        )
    return (None if len(numbers) == 1 else numbers[0]), numbers[-1]
