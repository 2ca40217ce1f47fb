"""Advantage estimators: from the rewards of a batch to how much better each token was than expected.

Every estimator is a pure function with keyword arguments that returns `(advantages, returns)`, both `[B, T]`, in the
dtype of the rewards and 0 where the mask is 0. It takes those of the following that it needs:

- `token_level_rewards[B, T]`;
- `response_mask[B, T]`: 1 where the policy produced the token (0: padding, tool output);
- `group_ids[B]`: integers, equal for responses to the same prompt;
- `values[B, T]`: the critic's, of the state before each token;
- `reward_baselines[B]`: the score of the greedy response to the row's prompt;
- `old_log_prob`, `sum_pi_squared`, `rollout_is_weights` `[B, T]`: see `token_baselines`;
- `reward_components`, `trajectory_ids`, `step_ids`, `observation_ids`: see `composed_advantages`;
- `gamma`, `lam`, `norm_adv_by_std_in_grpo`, `f_norm`, `handle_zero_tail`, `gdpo_reward_weights`, `gigpo_*`: from `algorithm.*`;
- `metrics`: a dict to which it may add figures of its own.

The outcome estimators judge the row as a whole by its score s_i = Σ_t r_t (over all t: a score is not lost if it was
put on a token that is not the policy's); their returns are the advantages themselves. The estimators that go through
time read rewards and values at policy tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.groups import PromptGroups, group_ids_from_uids
from quadriga.algorithms.masked import WHITEN_EPS, as_bool, masked_whiten, row_blocks, token_counts
from quadriga.errors import DataError
from quadriga.registry import Registry

STD_EPS = 1e-6

_ESTIMATORS: Registry[Callable[..., tuple[Tensor, Tensor]]] = Registry("advantage estimator", "algorithm.adv_estimator")
register_adv_est = _ESTIMATORS.register
get_adv_estimator = _ESTIMATORS.get
adv_estimator_names = _ESTIMATORS.names

_HOW_TO_GET = {
    "values": "this estimator needs a critic; enable it, or choose one that does without (grpo, rloo, …)",
    "group_ids": "give the prompt of every row (the batch's uid), equal for responses to the same prompt",
    "reward_baselines": "score one greedy response per prompt and give its score for every row",
    "old_log_prob": "this estimator needs the log-probs of the policy at the step's start, [rows, tokens]",
    "sum_pi_squared": "this estimator needs Σπ² of the policy before each token, [rows, tokens]",
    "reward_components": "set algorithm.gdpo_reward_keys to keys of the dict that the reward function returns",
}


@torch.no_grad()
def compute_advantage(
    name: str, *, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Any = None, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[B, T]` by the estimator `name`, after checking the inputs (see the module's docstring).

    An estimator is called with the inputs it declares; those that are None count as not given. `group_ids` may also be
    an array or list of uids of any kind.

    Raises:
        ConfigError: unknown name, or an input that the estimator needs is missing.
        DataError: shapes do not fit, or a row's reward is not finite.
    """
    if group_ids is not None and not isinstance(group_ids, Tensor):
        group_ids = group_ids_from_uids(group_ids).to(token_level_rewards.device)
    inputs |= {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "group_ids": group_ids}
    _check(token_level_rewards, inputs)
    result = _ESTIMATORS.call(name, inputs, _HOW_TO_GET)
    shape = token_level_rewards.shape
    if not (isinstance(result, tuple) and len(result) == 2 and all(getattr(x, "shape", 0) == shape for x in result)):
        raise DataError(
            f"The advantage estimator {name!r} did not return two tensors of shape {tuple(shape)}.",
            "return (advantages, returns), both shaped like the rewards",
        )
    return result


@register_adv_est("gae")
@torch.no_grad()
def gae(
    *, token_level_rewards: Tensor, response_mask: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438), whitened over the mask.

    Over the policy's tokens only, n(t) being the next of them after t and V = 0 past the last:
    δ_t = r_t + γ V_n(t) − V_t,   A_t = δ_t + γλ A_n(t),   returns R_t = A_t + V_t.

    It is computed in the equal form that needs one pass: H_t = λ r_t + (1−λ) V_t + γλ H_n(t),   R_t = r_t + γ H_n(t).
    """
    mask = as_bool(response_mask)
    advantages, returns = torch.empty_like(token_level_rewards), torch.empty_like(token_level_rewards)
    for rows in row_blocks(mask):
        reward, value, skip = token_level_rewards[rows], values[rows].to(token_level_rewards.dtype), ~mask[rows]
        ahead = _discounted_sum(reward if lam == 1 else torch.lerp(value, reward, lam), mask[rows], gamma * lam)
        block = returns[rows]
        block.copy_(reward)
        block[:, :-1].add_(ahead[:, 1:], alpha=gamma)
        torch.sub(block, value, out=advantages[rows])
        block.masked_fill_(skip, 0)
        advantages[rows].masked_fill_(skip, 0)
    return masked_whiten(advantages, mask), returns


@register_adv_est("grpo", "grpo_vectorized")
def grpo(
    *, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_adv_by_std_in_grpo: bool = True
) -> tuple[Tensor, Tensor]:
    """GRPO (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300): A_i = (s_i − mean) / (std + 1e-6) within the group.

    Without the division when `norm_adv_by_std_in_grpo` is false (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). The std
    is the unbiased one; a group of one has advantage 0.
    """
    scores, groups = scores_of(token_level_rewards), PromptGroups.of(group_ids)
    advantages = scores - groups.mean(scores)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + STD_EPS)
    return over_tokens(advantages, token_level_rewards, response_mask)


@register_adv_est("rloo", "rloo_vectorized")
def rloo(*, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740): A_i = s_i − mean of the others in the group.

    Equal to n/(n−1) · (s_i − group mean); a group of one has advantage 0.
    """
    scores, groups = scores_of(token_level_rewards), PromptGroups.of(group_ids)
    size = groups.size()
    advantages = (scores - groups.mean(scores)) * size / (size - 1).clamp(min=1)
    return over_tokens(advantages, token_level_rewards, response_mask)


@register_adv_est("reinforce_plus_plus")
def reinforce_plus_plus(
    *, token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): discounted return-to-go G_t = r_t + γ G_n(t), whitened over the mask.

    n(t) is the policy's next token after t: a gap neither discounts nor ends the return.
    """
    returns = return_to_go(token_level_rewards, response_mask, gamma)
    return masked_whiten(returns, response_mask), returns


@register_adv_est("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    *, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with baseline (Hu 2025, arXiv 2501.03262): s_i − group mean on every token, whitened over the batch.

    The whitening is over tokens, so a row counts as often as it has tokens; as its tokens are all alike, the moments
    are taken over rows, weighted by length.
    """
    scores, length = scores_of(token_level_rewards), token_counts(response_mask).double()
    centred = scores - PromptGroups.of(group_ids).mean(scores)
    tokens = length.sum()
    if tokens == 0:
        raise DataError("No row of the batch has a token.", "look at why the response mask is empty")
    centred = centred - (length * centred).sum() / tokens
    variance = (length * centred.square()).sum() / (tokens - 1).clamp(min=1)
    return over_tokens(centred * torch.rsqrt(variance + WHITEN_EPS), token_level_rewards, response_mask)


@register_adv_est("remax")
def remax(*, token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax (Li et al. 2023, arXiv 2310.10505): A_t = Σ_{k≥t} r_k − score of the greedy response to the same prompt."""
    returns = return_to_go(token_level_rewards, response_mask, gamma=1.0)
    baseline = reward_baselines.to(returns.dtype).unsqueeze(-1)
    return (returns - baseline).masked_fill_(~as_bool(response_mask), 0), returns


@register_adv_est("opo")
def opo(*, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """OPO (Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585): length-weighted baseline.

    A_i = s_i − Σ_j len_j s_j / Σ_j len_j over the group.
    """
    scores, groups = scores_of(token_level_rewards), PromptGroups.of(group_ids)
    length = token_counts(response_mask).double()
    baseline = groups.total(length * scores) / groups.total(length).clamp(min=1)
    return over_tokens(scores - baseline, token_level_rewards, response_mask)


@register_adv_est("grpo_passk")
def grpo_passk(
    *, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, norm_adv_by_std_in_grpo: bool = True
) -> tuple[Tensor, Tensor]:
    """Pass@k (Tang et al. 2025, arXiv 2503.19595): only the best of a group has an advantage, its lead over the second.

    A_best = (best − second best) / (std + 1e-6), undivided when `norm_adv_by_std_in_grpo` is false; 0 for the others,
    for a shared first place, and in a group of one.
    """
    scores, groups = scores_of(token_level_rewards), PromptGroups.of(group_ids)
    advantages = groups.lead(scores)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.std(scores) + STD_EPS)
    return over_tokens(advantages, token_level_rewards, response_mask)


@register_adv_est("gpg")
def gpg(
    *, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, f_norm: float = 1.0
) -> tuple[Tensor, Tensor]:
    """GPG (Chu et al. 2025, Group Policy Gradient, arXiv 2504.02546): A_i = α (s_i − group mean) / f_norm.

    α = B / (number of rows with a non-zero score): groups that are all wrong must not shrink the gradient.
    """
    scores = scores_of(token_level_rewards)
    alpha = len(scores) / scores.count_nonzero().clamp(min=1).double()
    advantages = alpha * (scores - PromptGroups.of(group_ids).mean(scores)) / f_norm
    return over_tokens(advantages, token_level_rewards, response_mask)


def scores_of(token_level_rewards: Tensor) -> Tensor:
    """s_i = Σ_t r, `[B]`, in float64: equal scores then have a spread of exactly 0."""
    return token_level_rewards.sum(-1).double()


def over_tokens(advantages: Tensor, like: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """One number a row `[B]` → the same number on each of the row's tokens `[B, T]`, as advantages and as returns."""
    spread = torch.where(as_bool(response_mask), advantages.to(like.dtype).unsqueeze(-1), 0)
    return spread, spread


@torch.no_grad()
def return_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ G_n(t) over the policy's tokens, `[B, T]`; 0 elsewhere."""
    mask = as_bool(response_mask)
    returns = torch.empty_like(token_level_rewards)
    for rows in row_blocks(mask):
        returns[rows] = _discounted_sum(token_level_rewards[rows], mask[rows], gamma)
        returns[rows].masked_fill_(~mask[rows], 0)
    return returns


def _discounted_sum(x: Tensor, mask: Tensor, decay: float) -> Tensor:
    """S_t = x_t + decay · S_{t+1} where the mask is 1, and S_t = S_{t+1} where it is 0; `[B, T]`.

    The loop goes over time, with all rows of the block in one contiguous line of memory.
    """
    sums = torch.where(mask, x, 0).t().contiguous()
    factors = torch.full_like(sums, decay).masked_fill_(~mask.t(), 1)
    at, factor = sums.unbind(0), factors.unbind(0)
    for t in range(len(at) - 2, -1, -1):
        at[t].addcmul_(factor[t], at[t + 1])
    return sums.t()


def _check(rewards: Tensor, inputs: dict[str, Any]) -> None:
    if rewards.dim() != 2 or not rewards.is_floating_point():
        raise DataError(
            f"token_level_rewards is {rewards.dtype} {tuple(rewards.shape)}.", "give floating-point [rows, tokens]"
        )
    rows, tokens = rewards.shape
    by_row, by_token = (rows,), (rows, tokens)
    per_row = ("group_ids", "reward_baselines", "trajectory_ids", "step_ids", "observation_ids")
    per_token = ("response_mask", "values", "old_log_prob", "sum_pi_squared", "rollout_is_weights")
    expected = dict.fromkeys(per_row, by_row) | dict.fromkeys(per_token, by_token)
    for key, shape in expected.items():
        given = inputs.get(key)
        if given is not None and tuple(given.shape) != shape:
            raise DataError(
                f"{key} has shape {tuple(given.shape)}; with rewards {tuple(rewards.shape)} it must have {shape}.",
                "give one entry for each row" + (" and token" if shape == by_token else ""),
            )
    finite = rewards.sum(-1).isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise DataError(f"The reward of row {row} is not finite.", "look at the reward function's output for this row")
