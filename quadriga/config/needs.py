"""What a configuration implies: which models take part, how rows are cut into passes, whose calls are profiled.

Works on the typed `Config` and on Hydra's DictConfig alike: only attributes are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quadriga.config.distillation import divergence_of
from quadriga.config.names import CLIPPING_LOSSES, TOKEN_BASELINES
from quadriga.config.typed import get_key


def need_critic(config: Any) -> bool:
    """Whether a value model takes part: as `critic.enable` says, or else because `gae` needs values."""
    if not learns_from_rewards(config):
        return False
    if config.critic.enable is not None:
        return bool(config.critic.enable)
    return config.algorithm.adv_estimator == "gae"


def learns_from_rewards(config: Any) -> bool:
    """Whether rewards teach the policy: always, but in a distillation without task rewards."""
    return not config.distillation.enabled or bool(config.distillation.distillation_loss.use_task_rewards)


def need_reference_policy(config: Any) -> bool:
    """Whether the log-probs of the frozen start of the actor are needed: for a KL in the reward or in the loss."""
    return bool(config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss)


def correction_of(config: Any) -> Any:
    """`algorithm.rollout_correction` as it holds. Unless something else is asked for, samples by older weights are corrected by
    the loss itself, where it can be, and else weighted, like those of an engine with kernels of its own."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    asked = correction.rollout_is or correction.rollout_rs or correction.m2po_threshold
    asked = asked or correction.bypass_mode is not None
    asked = asked or config.actor_rollout_ref.actor.policy_loss.loss_mode == "decoupled"  # it has weights of its own
    older = config.async_training.staleness or config.episodes.read_from
    foreign = rollout.name != "native"
    if asked or not (older or foreign):
        return correction
    if older and not foreign and _loss_bounds_staleness(config):
        return replace(correction, bypass_mode=True)
    return replace(correction, rollout_is="token")


def _loss_bounds_staleness(config: Any) -> bool:
    """Whether the loss may compare the policy with whoever sampled: then its clip also bounds how far training runs from them.

    Importance weights correct the average of older samples, but nothing holds the policy back while it waits for newer
    ones: the quickstart four steps behind swings between 75 and 95 % with them and reaches 99 % with the clip. Not with
    truncated sampling: its probabilities are those of the few tokens left, and the ratio would be off from the start.
    """
    rollout = config.actor_rollout_ref.rollout
    clips = config.actor_rollout_ref.actor.policy_loss.loss_mode in CLIPPING_LOSSES
    untruncated = rollout.top_p >= 1 and rollout.top_k <= 0
    return clips and untruncated and not need_sum_pi_squared(config) and not config.distillation.enabled


def finishes_samples_first(config: Any) -> bool:
    """Whether an engine that generates ahead of training finishes what it writes before it takes new weights."""
    asynchronous = config.async_training
    return asynchronous.staleness > 0 and (asynchronous.mode == "ordered" or not asynchronous.partial_rollout)


def need_sum_pi_squared(config: Any) -> bool:
    """Whether the pass for old log-probs also tells Σπ² of every token: as the key says, or else for a token baseline."""
    asked = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    return config.algorithm.adv_estimator in TOKEN_BASELINES if asked is None else bool(asked)


def need_teacher_top_k(config: Any) -> int:
    """How many of the teachers' likeliest tokens the distillation loss compares; 0: it needs the sampled ones alone."""
    loss = config.distillation.distillation_loss
    return loss.topk if config.distillation.enabled and divergence_of(loss).endswith("_topk") else 0


def need_reward_model(config: Any) -> bool:
    return bool(config.reward_model.enable)


def is_judged_by_itself(config: Any) -> bool:
    """Whether the policy's own model is to score its responses: it has no head for that."""
    return need_reward_model(config) and config.reward_model.model.path == config.actor_rollout_ref.model.path


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


SECTIONS_OF_ROLES = {
    "actor_rollout": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "critic": "critic",
    "rm": "reward_model",
    "teacher": "distillation",
}
"""Role → the section that has its `profiler`."""


def profiler_section(config: Any, role: str) -> Any | None:
    """The `profiler` of a role; None for one that has none."""
    return get_key(config, SECTIONS_OF_ROLES[role]).profiler if role in SECTIONS_OF_ROLES else None
