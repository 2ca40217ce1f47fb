"""What a configuration implies: which models take part, and how rows are cut into passes.

Works on the typed `Config` and on Hydra's DictConfig alike: only attributes are read.
"""

from __future__ import annotations

from typing import Any


def need_critic(config: Any) -> bool:
    """Whether a value model takes part: as `critic.enable` says, or else because `gae` needs values."""
    if config.critic.enable is not None:
        return bool(config.critic.enable)
    return config.algorithm.adv_estimator == "gae"


def need_reference_policy(config: Any) -> bool:
    """Whether the log-probs of the frozen start of the actor are needed: for a KL in the reward or in the loss."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def need_reward_model(config: Any) -> bool:
    return bool(config.reward_model.enable)


def uses_token_budget(section: Any) -> bool:
    """Whether passes over rows are filled up to a token budget, or else have a fixed number of rows.

    Args:
        section: `actor_rollout_ref.{actor,ref,rollout}`, `critic` or `reward_model`.
    """
    for micro, dynamic in (
        ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
        ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
    ):
        if hasattr(section, micro):
            choice = getattr(section, dynamic)
            return bool(choice) if choice is not None else getattr(section, micro) is None
    return section.micro_batch_size_per_gpu is None


AUTO_TOKENS = 16384
"""What a token budget of `auto` counts as where no memory was measured: in plans, and on a CPU."""


def token_budget(value: int | str) -> int:
    """A token budget as a number."""
    return AUTO_TOKENS if value == "auto" else int(value)
