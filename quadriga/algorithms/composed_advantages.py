"""Estimators that compare several times: by each of several rewards, or whole episodes and single steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quadriga.algorithms.advantages import STD_EPS, over_tokens, register_adv_est, scores_of
from quadriga.algorithms.groups import PromptGroups
from quadriga.algorithms.masked import masked_whiten
from quadriga.errors import ConfigError, DataError


@register_adv_est("gdpo")
def gdpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    reward_components: Mapping[str, Tensor],
    gdpo_reward_weights: Sequence[float] | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    metrics: dict[str, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """GDPO (Group reward-Decoupled Normalization Policy Optimization, arXiv 2601.05242).

    Each reward k is compared by itself: a_k = (r_k − group mean) / (group std + 1e-6); A = Σ_k w_k a_k on every token, whitened
    over the batch. So a reward's scale does not matter, and a constant one adds nothing. A group of one has 0 before the
    whitening. `reward_components`: the rewards `[B]` by name; weights in the same order, by default 1.
    """
    weights = [1.0] * len(reward_components) if gdpo_reward_weights is None else list(gdpo_reward_weights)
    if len(weights) != len(reward_components) or not weights:
        raise ConfigError(
            f"gdpo has {len(reward_components)} rewards ({', '.join(reward_components)}) and {len(weights)} weights.",
            "give one of algorithm.gdpo_reward_weights for each of algorithm.gdpo_reward_keys",
        )
    groups = PromptGroups.of(group_ids)
    total = torch.zeros(len(group_ids), dtype=torch.float64, device=token_level_rewards.device)
    for (name, reward), weight in zip(reward_components.items(), weights):
        reward = reward.double()
        if not bool(reward.isfinite().all()):
            row = int((~reward.isfinite()).nonzero()[0])
            raise DataError(
                f"The reward {name!r} of row {row} is not finite.", "look at what the reward function returns"
            )
        spread = groups.std(reward)
        compared = reward - groups.mean(reward)
        total = total + weight * (compared / (spread + STD_EPS) if norm_adv_by_std_in_grpo else compared)
        if metrics is not None:
            metrics[f"gdpo/{name}/mean"] = float(reward.mean())
            metrics[f"gdpo/{name}/std"] = float(reward.std(correction=0))
            metrics[f"gdpo/{name}/groups_without_spread"] = float((spread == 0).double().mean())
    advantages, _ = over_tokens(total, token_level_rewards, response_mask)
    advantages = masked_whiten(advantages, response_mask)
    return advantages, advantages


@register_adv_est("gigpo")
def gigpo(
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    trajectory_ids: Tensor | None = None,
    step_ids: Tensor | None = None,
    observation_ids: Tensor | None = None,
    gigpo_step_weight: float = 1.0,
    gigpo_gamma: float = 0.95,
    gigpo_norm_steps_by_std: bool = False,
    norm_adv_by_std_in_grpo: bool = True,
    metrics: dict[str, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """GiGPO (Feng et al. 2025, Group-in-Group Policy Optimization, arXiv 2505.10978), one row a step of a trajectory.

    A = A_episode + ω·A_step. A_episode is GRPO's, over the total rewards of the group's *trajectories*, given to all their
    steps. A_step compares R_t = r_t + γR_{t+1} with that of the prompt's other steps at the same observation; a step that
    nobody else saw has 0. ω = `gigpo_step_weight`, γ = `gigpo_gamma` by the step; the steps' std divides only if asked.

    Args:
        trajectory_ids, step_ids, observation_ids: `[B]` integers: which trajectory a row is of, its place in it, and what the
            policy saw (equal numbers for equal observations). By default each row is a trajectory of one step, which saw
            its prompt.
    """
    rewards, groups = scores_of(token_level_rewards), PromptGroups.of(group_ids)
    rows = torch.arange(len(rewards), device=rewards.device)
    trajectories = PromptGroups.of(rows if trajectory_ids is None else trajectory_ids)
    steps = torch.zeros_like(rows) if step_ids is None else step_ids
    seen = groups.index if observation_ids is None else observation_ids
    same_state = PromptGroups.of_pairs(groups.index, seen)

    # A trajectory counts once in its group, however many steps it has.
    share = 1 / trajectories.size().double()
    total = trajectories.total(rewards)
    count = groups.total(share)
    mean = groups.total(share * total) / count
    episode = total - mean
    if norm_adv_by_std_in_grpo:
        variance = groups.total(share * episode.square()) / (count - 1).clamp(min=1)
        episode = episode / (variance.sqrt() + STD_EPS)
    episode = torch.where(count.round() > 1, episode, 0)

    ahead = _return_over_steps(rewards, trajectories, steps, gigpo_gamma)
    step = ahead - same_state.mean(ahead)
    if gigpo_norm_steps_by_std:
        step = step / (same_state.std(ahead) + STD_EPS)
    if metrics is not None:
        metrics["gigpo/step_group_size"] = float(same_state.size().double().mean())
    return over_tokens(episode + gigpo_step_weight * step, token_level_rewards, response_mask)


def _return_over_steps(rewards: Tensor, trajectories: PromptGroups, steps: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + γR_{t+1} over each trajectory's steps in their order, `[B]`."""
    order = torch.argsort(steps, stable=True)
    order = order[torch.argsort(trajectories.index[order], stable=True)]
    owner = trajectories.index[order]
    first = trajectories.counts.cumsum(0) - trajectories.counts
    place = torch.arange(len(order), device=order.device) - first[owner]
    repeated = (owner[1:] == owner[:-1]) & (steps[order][1:] == steps[order][:-1])
    if bool(repeated.any()):
        raise DataError(
            f"Row {int(order[1:][repeated][0])} is a step of a trajectory that has another with the same number.",
            "number the steps of a trajectory 0, 1, 2, …",
        )
    table = torch.zeros(
        len(trajectories.counts), int(trajectories.counts.max()), dtype=rewards.dtype, device=order.device
    )
    table[owner, place] = rewards[order]
    for t in range(table.shape[1] - 2, -1, -1):
        table[:, t] += gamma * table[:, t + 1]
    ahead = torch.empty_like(rewards)
    ahead[order] = table[owner, place]
    return ahead
