"""Choosing tokens of a **whole mini-batch of all ranks**, before it is cut into micro-batches.

What a choice depends on (means, ranks, a number of tokens, a draw) is the mini-batch's, never a micro-batch's, so that any
partition of the rows gives the same tokens. The choice goes to the loss as a column: `cov_selected` for the losses that
treat chosen tokens in their own way, or weights of 0 and 1 (`Aggregation.weighted`), under which a dropped token stays
in every divisor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.masked import LOG_RATIO_BOUND, as_bool, masked_sum
from quadriga.algorithms.policy_losses import clip_range, log_ratio_of, row_mean
from quadriga.errors import ConfigError


@torch.no_grad()
def select_by_covariance(
    loss_mode: str,
    *,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    priority: Tensor,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    kl_cov_ratio: float = 2e-4,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> Tensor:
    """The tokens that cost the most entropy (Cui et al. 2025, arXiv 2505.22617), of N in all; booleans `[B, T]`.

    cov_t = (A_t − Ā)(log_prob_t − mean log_prob) over the mask tells how much a token lowers the entropy.
    `kl_cov`: the max(1, ⌊`kl_cov_ratio`·N⌋) with the largest covariance. `clip_cov`: max(1, ⌊`clip_cov_ratio`·N⌋) at random of
    those with `clip_cov_lb` < cov < `clip_cov_ub` that PPO's clip does not hold already; none where there are no such.

    Args:
        priority: `[B, T]` random numbers (`random_priorities`): they draw, and decide between equals.
    """
    mask = as_bool(response_mask)
    count = int(mask.sum())
    if not count:
        return mask
    covariance = _centred(advantages, mask) * _centred(log_prob, mask)
    if loss_mode == "kl_cov":
        return _first(mask, -covariance, priority, max(1, int(kl_cov_ratio * count)))
    if loss_mode != "clip_cov":
        raise ConfigError(f"{loss_mode} does not choose tokens by covariance.", "use clip_cov or kl_cov")
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = log_ratio_of(log_prob, old_log_prob, mask).exp()
    held = torch.where(advantages > 0, ratio > 1 + high, (advantages < 0) & (ratio < 1 - low))
    candidates = mask & (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & ~held
    return _first(candidates, torch.zeros_like(covariance), priority, max(1, int(clip_cov_ratio * count)))


@torch.no_grad()
def select_by_entropy(*, entropy: Tensor, response_mask: Tensor, priority: Tensor, share: float) -> Tensor:
    """The share ρ of a whole mini-batch's tokens with the highest entropy (arXiv 2506.01939), `[B, T]`.

    At least one. The loss is on these alone, its divisor is all tokens.
    """
    mask = as_bool(response_mask)
    return _first(mask, -entropy.double(), priority, max(1, int(share * int(mask.sum()))))


@torch.no_grad()
def off_policy_sequence_mask(
    *, log_prob: Tensor, rollout_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, delta: float
) -> Tensor:
    """OPSM (DeepSeek-V3.2 2025, arXiv 2512.02556): 0 for tokens with A < 0 in rows with mean_t(μ − log_prob) > δ, else 1.

    A bad sample that the policy would hardly write any more has nothing to teach. `[B, T]` weights: dropped tokens stay
    in the divisor.
    """
    drift = row_mean(torch.where(as_bool(response_mask), rollout_log_prob - log_prob, 0), response_mask)
    dropped = (advantages < 0) & (drift > delta) & as_bool(response_mask)
    return (~dropped).to(log_prob.dtype)


@torch.no_grad()
def second_moment_mask(
    *, old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, threshold: float
) -> Tensor:
    """M2PO (arXiv 2510.01161): 0 for the tokens with the largest (μ − π_prox)², else 1, `[B, T]`.

    As few as needed are dropped for the mean of the rest to be below `threshold` (0.04); at least one stays. Over the
    whole batch; dropped tokens stay in the divisor.
    """
    mask = as_bool(response_mask)
    gap = torch.where(mask, rollout_log_prob - old_log_prob, 0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    squares = gap.square()[mask].double()
    weights = torch.ones_like(old_log_prob)
    if not len(squares):
        return weights
    rising, order = squares.sort(stable=True)
    means = rising.cumsum(0) / torch.arange(1, len(rising) + 1, device=rising.device)
    kept = max(1, int((means < threshold).sum()))  # the means of growing prefixes do not fall
    chosen = torch.zeros_like(squares)
    chosen[order[:kept]] = 1
    weights[mask] = chosen.to(weights.dtype)
    return weights


def dropped_share(weights: Tensor, mask: Tensor) -> Tensor:
    """Share of the mask's tokens with weight 0, for the metrics of the masks above."""
    return masked_sum((weights == 0).to(weights.dtype), mask) / as_bool(mask).sum().clamp(min=1)


@torch.no_grad()
def random_priorities(token_ids: Tensor, width: int, seed: int) -> Tensor:
    """A number in [0, 1) for each response token, `[B, T]`, that depends on the seed, the row's tokens and the position.

    So a draw is the same however the rows are dealt to ranks, and identical rows, which are interchangeable, draw alike.

    Args:
        token_ids: `[B, L]` of the whole rows; columns of padding must hold the same everywhere, say 0.
        width: T, the response tokens of a row.
    """
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    rows = _mixed(token_ids.long() * 0x9E3779B1 + _mixed(columns) * (token_ids != 0)).sum(-1, keepdim=True)
    positions = torch.arange(width, device=token_ids.device)
    bits = _mixed(_mixed(rows + seed * 0x85EBCA6B) + positions)
    return (bits & ((1 << 52) - 1)).double() / (1 << 52)


def _mixed(x: Tensor) -> Tensor:
    """Bits of int64 numbers stirred (the finaliser of SplitMix64); multiplication wraps around."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def _centred(x: Tensor, mask: Tensor) -> Tensor:
    """x less its mean over the mask, in float64; 0 off the mask."""
    kept = torch.where(mask, x, 0).double()
    return torch.where(mask, kept - masked_sum(kept, mask) / mask.sum(), 0)


def _first(candidates: Tensor, order: Tensor, priority: Tensor, count: int) -> Tensor:
    """The `count` candidates that come first by `order`, then by `priority`; booleans of their shape."""
    places = candidates.flatten().nonzero().squeeze(-1)
    by_priority = places[priority.flatten()[places].argsort(stable=True)]
    ranked = by_priority[order.flatten()[by_priority].argsort(stable=True)]
    chosen = torch.zeros_like(candidates).flatten()
    chosen[ranked[:count]] = True
    return chosen.view_as(candidates)
