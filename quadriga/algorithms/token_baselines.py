"""Advantages with the baseline of least variance at every token.

The variance of a policy gradient with a baseline is least where each return is weighted by the squared norm of its score.
At the logits that norm is e_t = 1 − 2Q_t + Σ_v π_v², Q the probability of the token that was sampled: 0 where the policy was
certain, up to 2 where it was surprised. Up to token t a row has collected W_t = Σ_{j≤t} e_j, and within a prompt's group

    b_t = Σ_i G_i,t W_i,t / (Σ_i W_i,t + 1e-8) over the rows that have a token at position t,   A = G − b,

G the undiscounted return-to-go. With importance weights w of the rollout correction e is multiplied by w². A group of one
has advantage 0. All-equal G give A = G·1e-8/ΣW, about 0 unless the first tokens were all but certain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.advantages import register_adv_est, return_to_go
from quadriga.algorithms.groups import PromptGroups
from quadriga.algorithms.masked import as_bool
from quadriga.errors import DataError

WEIGHT_EPS = 1e-8


@register_adv_est("optimal_token_baseline")
def optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_prob: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline (Greensmith et al. 2004, Variance Reduction Techniques for Gradient Estimates, by the token).

    See the module's docstring. A position is a column, so the masks must have no gaps. `handle_zero_tail`: where only the
    longest row of a group is left, b = 0 (it would be the row's own return, and A = 0).
    """
    mask = as_bool(response_mask)
    gaps = (mask[:, 1:] & ~mask[:, :-1]).any(-1)
    if bool(gaps.any()):
        raise DataError(
            f"Row {int(gaps.nonzero()[0])} has a gap in its response mask, and optimal_token_baseline compares columns.",
            "use algorithm.adv_estimator=tir_optimal_token_baseline, which compares the rows' own tokens",
        )
    returns = return_to_go(token_level_rewards, mask, gamma=1.0)
    weights = _collected(mask, old_log_prob, sum_pi_squared, rollout_is_weights)
    return _less_baseline(returns, weights, mask, group_ids, handle_zero_tail), returns


@register_adv_est("tir_optimal_token_baseline")
def tir_optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_prob: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """The optimal token baseline for tool-integrated reasoning: a position is a token's rank among its row's own tokens.

    What tools wrote in between does not shift a row against the others. Without gaps it is `optimal_token_baseline`.
    """
    mask = as_bool(response_mask)
    returns = return_to_go(token_level_rewards, mask, gamma=1.0)
    weights = _collected(mask, old_log_prob, sum_pi_squared, rollout_is_weights)
    order = torch.argsort((~mask).int(), dim=-1, stable=True)
    closed, collected, own = (x.gather(-1, order) for x in (returns, weights, mask))
    advantages = _less_baseline(closed, collected, own, group_ids, handle_zero_tail)
    return torch.zeros_like(returns).scatter(-1, order, advantages), returns


def _collected(mask: Tensor, old_log_prob: Tensor, sum_pi_squared: Tensor, weights: Tensor | None) -> Tensor:
    """W_t, `[B, T]` in float64; what it is off the mask means nothing."""
    norm = (1 - 2 * old_log_prob.double().exp() + sum_pi_squared.double()).clamp(min=0)
    if weights is not None:
        norm = norm * weights.double().square()
    return torch.where(mask, norm, 0).cumsum(-1)


def _less_baseline(returns: Tensor, weights: Tensor, mask: Tensor, group_ids: Tensor, zero_tail: bool) -> Tensor:
    """G − b for masks without gaps, 0 off them and for the only row of a group that has tokens."""
    groups = PromptGroups.of(group_ids)
    weights = torch.where(mask, weights, 0)
    there = groups.total(mask.double())
    baseline = groups.total(weights * returns.double()) / (groups.total(weights) + WEIGHT_EPS)
    if zero_tail:
        baseline = torch.where(there == 1, 0, baseline)
    rows_with_tokens = groups.total(mask.any(-1).double())
    advantages = torch.where(mask & (rows_with_tokens > 1).unsqueeze(-1), returns.double() - baseline, 0)
    return advantages.to(returns.dtype)
