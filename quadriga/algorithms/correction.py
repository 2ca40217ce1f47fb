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

from quadriga.algorithms.masked import LOG_RATIO_BOUND, as_bool, masked_mean, masked_sum, token_counts
from quadriga.config.rollout_correction import Rejection, parse_bounds, parse_rejections
from quadriga.errors import ConfigError


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
    token_versions: Tensor | None = None,
    version: int | None = None,
) -> RolloutCorrection:
    """Weights, mask and metrics for a batch, by the keys of `algorithm.rollout_correction`; see the module's docstring.

    `rollout_is_batch_normalize` divides the weights by their mean, over the tokens or over the sequences kept. Metrics, besides those of
    `mismatch_metrics`: `rollout_corr/is_mean` (before that division) and `rollout_corr/ess` of the weights in use,
    `rollout_corr/is_clipped_fraction` (tokens outside the bounds), `rollout_corr/masked_fraction` and
    `rollout_corr/seq_masked_fraction` (tokens and rows that no longer contribute); with `token_versions[B, T]` and `version`
    also those of `staleness_metrics`.
    """
    mask = as_bool(response_mask)
    metrics = mismatch_metrics(old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob, response_mask=mask)
    if token_versions is not None and version is not None:
        metrics |= staleness_metrics(token_versions=token_versions, version=version, response_mask=mask)
    d = torch.where(mask, old_log_prob - rollout_log_prob, 0)
    kept = mask & accepted(d, mask, rollout_rs, rollout_rs_threshold)
    weights = None
    contributes = kept
    if rollout_is is not None:
        weights, clipped = importance_weights(d, kept, rollout_is, rollout_is_threshold)
        mean = masked_sum(weights, kept) / kept.sum().clamp(min=1)
        if rollout_is_batch_normalize:
            counted = kept if rollout_is == "token" else _first_tokens(kept)  # a sequence has one weight, however long
            divisor = masked_sum(weights, counted) / counted.sum().clamp(min=1)
            weights = weights / divisor.clamp(min=torch.finfo(divisor.dtype).tiny)
        metrics["rollout_corr/is_mean"] = mean
        metrics["rollout_corr/is_clipped_fraction"] = masked_mean(clipped.to(d.dtype), mask)
        metrics["rollout_corr/ess"] = effective_sample_size(weights, kept)
        contributes = kept & (weights > 0)
    metrics["rollout_corr/masked_fraction"] = masked_mean((~contributes).to(d.dtype), mask)
    had_tokens = mask.any(-1)
    metrics["rollout_corr/seq_masked_fraction"] = masked_mean((~contributes.any(-1)).to(d.dtype), had_tokens)
    return RolloutCorrection(weights, kept, metrics)


def _first_tokens(mask: Tensor) -> Tensor:
    """The mask with nothing but each row's first token."""
    return mask & (mask.cumsum(-1) == 1)


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
    lower, upper = parse_bounds(threshold)
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


@torch.no_grad()
def staleness_metrics(*, token_versions: Tensor, version: int, response_mask: Tensor) -> dict[str, Tensor]:
    """How many versions behind the tokens `[B, T]` are, by whoever wrote each; `version` is that of the policy which learns.

    `rollout_corr/staleness_mean`, `rollout_corr/staleness_max` over tokens, and `rollout_corr/versions_in_row_max`: how many
    versions at most had a hand in one row. A token of `version` itself is 0 behind.
    """
    mask = as_bool(response_mask)
    behind = torch.where(mask, version - token_versions, 0)
    newest = torch.where(mask, token_versions, torch.iinfo(token_versions.dtype).min).amax(-1)
    oldest = torch.where(mask, token_versions, torch.iinfo(token_versions.dtype).max).amin(-1)
    span = torch.where(mask.any(-1), newest - oldest + 1, 0)
    return {
        "rollout_corr/staleness_mean": masked_mean(behind.double(), mask),
        "rollout_corr/staleness_max": behind.max().double(),
        "rollout_corr/versions_in_row_max": span.max().double(),
    }


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """(Σw)² / (n Σw²) over the mask, in [0, 1]: the share of the samples that a weighted mean is worth."""
    total, squares = masked_sum(weights, mask), masked_sum(weights.square(), mask)
    return total.square() / (as_bool(mask).sum() * squares).clamp(min=torch.finfo(weights.dtype).tiny)


def accepted(d: Tensor, mask: Tensor, rollout_rs: str | None, rollout_rs_threshold: float | str | None) -> Tensor:
    """Where all tests of `rollout_rs` hold, `[B, T]`, for log-ratios `d[B, T]` that are 0 off the mask."""
    held = torch.ones_like(mask)
    for test in parse_rejections(rollout_rs, rollout_rs_threshold):
        held = held & _passes(d, mask, test)
    return held


def _passes(d: Tensor, mask: Tensor, test: Rejection) -> Tensor:
    """Where one rejection test holds, `[B, T]` or `[B, 1]`, for log-ratios `d` that are 0 off the mask."""
    scope, statistic, (lower, upper) = test
    if statistic != "k1":
        safe = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        divergence = d.square() / 2 if statistic == "k2" else torch.expm1(safe) - safe
        return _over_scope(divergence, mask, scope, "amax") <= upper
    assert lower is not None  # the parser gives a k1 test both
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
