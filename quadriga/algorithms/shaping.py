"""What is done to scores and rows around the estimator: rewards for short answers, and PF-PPO's choice of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quadriga.algorithms.groups import PromptGroups
from quadriga.errors import ConfigError
from quadriga.registry import Registry

LengthReward = Callable[..., Tensor]
_LENGTH_REWARDS: Registry[LengthReward] = Registry("length reward", "algorithm.length_reward")
register_length_reward = _LENGTH_REWARDS.register
length_reward_names = _LENGTH_REWARDS.names

RESAMPLING_EPS = 1e-8


@torch.no_grad()
def length_reward(
    name: str, *, scores: Tensor, lengths: Tensor, group_ids: Tensor, weight: float | None = None
) -> Tensor:
    """What `algorithm.length_reward` adds to the rows' scores, `[B]`; `lengths[B]` in tokens. 0 in a group of one."""
    groups = PromptGroups.of(group_ids)
    inputs = {"scores": scores.double(), "lengths": lengths.double(), "groups": groups, "weight": weight}
    added = _LENGTH_REWARDS.call(name, inputs)
    return torch.where(groups.size() > 1, added, 0).to(scores.dtype)


@register_length_reward("kimi")
def kimi(*, scores: Tensor, lengths: Tensor, groups: PromptGroups, weight: float = 1.0) -> Tensor:
    """Kimi k1.5 (2025, arXiv 2501.12599): λ = ½ − (len − min)/(max − min) within the group, 0 where all are equally long.

    A right answer (score above 0) gets +λ, a wrong one min(0, λ): short wrong answers are not rewarded.
    """
    shortest, longest = -groups.most(-lengths), groups.most(lengths)
    rank = torch.where(longest > shortest, 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1), 0)
    return weight * torch.where(scores > 0, rank, rank.clamp(max=0))


@register_length_reward("prime_rl")
def prime_rl(*, scores: Tensor, lengths: Tensor, groups: PromptGroups, weight: float = 0.25) -> Tensor:
    """prime-rl: −weight · (group mean score) · len / (longest of the group).

    The pressure grows with how well the prompt is solved; a group that failed altogether is left alone.
    """
    return -weight * groups.mean(scores) * lengths / groups.most(lengths).clamp(min=1)


@torch.no_grad()
def pf_ppo_rows(
    scores: Tensor,
    *,
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    seed: int = 0,
    count: int | None = None,
) -> Tensor:
    """PF-PPO (Shen et al. 2024, Policy Filtration, arXiv 2409.06957): `count` rows, else as many as there are, drawn with replacement.

    A row's chance is proportional to w + 1e-8. `pow`: w = |score|^`weight_pow`; `max_min`: 1 for rows at the batch's highest or
    lowest score, else 0; `max_random`: 0.4 for the highest, 0.1 for the others. Returns row numbers `[B]`, the same for
    the same seed.
    """
    scores = scores.double().cpu()
    best, worst = scores == scores.max(), scores == scores.min()
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = (best | worst).double()
    elif reweight_method == "max_random":
        weights = torch.where(best, 0.4, 0.1).double()
    else:
        raise ConfigError(
            f"algorithm.pf_ppo.reweight_method={reweight_method!r} is unknown.", "use pow, max_min or max_random"
        )
    random = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights + RESAMPLING_EPS, count or len(scores), replacement=True, generator=random)
