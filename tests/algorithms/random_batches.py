"""Random padded batches for the properties: lengths from 0, gaps, groups of any size, log-probs down to −1e4."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

seeds = st.integers(0, 2**31 - 1)
sizes = st.tuples(st.integers(1, 9), st.integers(1, 12))


def make_batch(
    seed: int, size: tuple[int, int], *, dtype: torch.dtype = torch.float64, extreme: bool = False
) -> dict[str, torch.Tensor]:
    """A batch with at least one token; zeros elsewhere in the mask may be padding, gaps or whole rows."""
    rows, tokens = size
    random = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(rows, tokens, generator=random, dtype=torch.float64)

    lengths = torch.randint(0, tokens + 1, (rows,), generator=random)
    mask = torch.arange(tokens) < lengths[:, None]
    mask &= torch.rand(rows, tokens, generator=random) < 0.8
    mask[int(torch.randint(0, rows, (1,), generator=random)), 0] = True
    old_log_prob = -normal().abs() * 2
    log_prob = old_log_prob + 0.4 * normal()
    if extreme:
        log_prob = torch.where(torch.rand(rows, tokens, generator=random) < 0.2, -1e4, log_prob)
        old_log_prob = torch.where(torch.rand(rows, tokens, generator=random) < 0.2, -1e4, old_log_prob)
    rewards = torch.where(torch.rand(rows, tokens, generator=random) < 0.4, normal(), 0.0) * mask
    batch = {
        "token_level_rewards": rewards,
        "values": normal(),
        "reward_baselines": normal()[:, 0],
        "log_prob": log_prob,
        "old_log_prob": old_log_prob,
        "ref_log_prob": old_log_prob + 0.3 * normal(),
        "advantages": normal() * mask,
        "returns": normal(),
        "rollout_is_weights": normal().abs() * mask,
    }
    batch = {key: value.to(dtype) for key, value in batch.items()}
    batch["response_mask"] = mask
    batch["group_ids"] = torch.randint(-2, 3, (rows,), generator=random) * 7
    batch["rollout_log_prob"] = (old_log_prob + 0.3 * normal()).to(dtype)
    batch["token_versions"] = torch.randint(0, 4, (rows, tokens), generator=random)
    batch["cov_selected"] = torch.rand(rows, tokens, generator=random) < 0.3
    batch["sum_pi_squared"] = (old_log_prob.exp().square() * torch.rand(rows, tokens, generator=random)).to(dtype)
    return batch


ADVANTAGE_INPUTS = ("token_level_rewards", "response_mask", "group_ids", "values", "reward_baselines")
LOSS_INPUTS = ("log_prob", "old_log_prob", "advantages", "response_mask")


def only(batch: dict[str, torch.Tensor], keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {key: batch[key] for key in keys}
