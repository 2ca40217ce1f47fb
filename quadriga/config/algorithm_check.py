"""Estimators, losses and corrections: what they cannot do without, and what would compute something else together."""

from __future__ import annotations

from quadriga.config.names import ADV_ESTIMATORS, GROUP_ESTIMATORS, TOKEN_BASELINES
from quadriga.config.needs import learns_from_rewards, need_critic, need_reward_model
from quadriga.config.rollout_correction import report_rollout_correction
from quadriga.config.schema import Config
from quadriga.config.typed import Problems

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS, CORRECTION = f"{ACTOR}.policy_loss", "algorithm.rollout_correction"


def report_algorithm(config: Config, problems: Problems) -> None:
    """Note options that an estimator or a loss cannot do without, or cannot be had with."""
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if estimator in GROUP_ESTIMATORS and n < 2 and learns_from_rewards(config):
        problems.add(
            f"algorithm.adv_estimator={estimator} compares the responses to a prompt, but {ROLLOUT}.n={n}: "
            "every advantage would be 0 and nothing would be learned",
            f"set {ROLLOUT}.n=2 or more (8 is usual), or algorithm.adv_estimator=gae",
        )
    if config.algorithm.filter_groups.enable and n < 2:
        problems.add(
            "algorithm.filter_groups.enable=True drops groups whose responses all score the same, but "
            f"{ROLLOUT}.n={n}: every group would be dropped",
            f"set {ROLLOUT}.n=2 or more, or algorithm.filter_groups.enable=False",
        )
    if estimator == "gae" and config.critic.enable is False:
        problems.add(
            "algorithm.adv_estimator=gae needs the values of a critic, but critic.enable=False",
            "remove critic.enable, or set algorithm.adv_estimator=grpo",
        )
    if config.critic.enable and estimator in ADV_ESTIMATORS and estimator != "gae":
        problems.add(
            f"critic.enable=True, but algorithm.adv_estimator={estimator} does not use its values",
            "remove critic.enable, or set algorithm.adv_estimator=gae",
        )
    _losses(config, problems)
    _estimators(config, problems)
    report_rollout_correction(config.algorithm.rollout_correction, problems)
    steps = config.trainer.total_training_steps
    if steps is not None and need_critic(config) and config.trainer.critic_warmup >= steps:
        problems.add(
            f"trainer.critic_warmup={config.trainer.critic_warmup} covers all of trainer.total_training_steps={steps}: "
            "the policy would never be updated",
            f"set trainer.critic_warmup={steps - 1} or less",
        )


def _losses(config: Config, problems: Problems) -> None:
    loss, correction = config.actor_rollout_ref.actor.policy_loss, config.algorithm.rollout_correction
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        problems.add(
            f"{LOSS}.loss_mode=dro needs its pull towards the old policy",
            f"set {LOSS}.dro_beta, e.g. to 0.1",
        )
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        problems.add(
            f"{LOSS}.clip_cov_lb={loss.clip_cov_lb} is not below {LOSS}.clip_cov_ub={loss.clip_cov_ub}: no token could be held",
            f"set {LOSS}.clip_cov_lb=1.0 and {LOSS}.clip_cov_ub=5.0",
        )
    if loss.loss_mode == "prime_rl" and not correction.bypass_mode:
        problems.add(
            f"{LOSS}.loss_mode=prime_rl compares with the policy that sampled, not with recomputed log-probs",
            f"set {CORRECTION}.bypass_mode=True",
        )
    if loss.loss_mode == "vespo" and correction.rollout_is == "sequence":
        problems.add(
            f"{LOSS}.loss_mode=vespo takes the product of the tokens' rollout weights, and {CORRECTION}.rollout_is=sequence "
            "gives each token that of its row: it would count once for every token",
            f"set {CORRECTION}.rollout_is=token",
        )
    if loss.loss_mode == "decoupled":
        _decoupled(config, problems)
    if correction.loss_type == "reinforce":
        if not correction.bypass_mode:
            problems.add(
                f"{CORRECTION}.loss_type=reinforce belongs to bypass_mode, which is off",
                f"set {CORRECTION}.bypass_mode=True, or policy_loss.loss_mode=gpg for a plain policy gradient",
            )
        if loss.loss_mode not in ("vanilla", "gpg"):
            problems.add(
                f"{CORRECTION}.loss_type=reinforce replaces {LOSS}.loss_mode={loss.loss_mode}",
                "remove one of them",
            )


def _decoupled(config: Config, problems: Problems) -> None:
    """This loss weighs by proximal policy over sampling policy itself."""
    correction, teaching = config.algorithm.rollout_correction, config.distillation
    if correction.rollout_is is not None:
        problems.add(
            f"{LOSS}.loss_mode=decoupled weighs by who sampled already, and {CORRECTION}.rollout_is={correction.rollout_is} "
            "would do it a second time",
            f"remove {CORRECTION}.rollout_is; {LOSS}.behaviour_level, behaviour_cap and behaviour_bound are its options",
        )
    if correction.bypass_mode:
        problems.add(
            f"{LOSS}.loss_mode=decoupled tells the policy at the step's start from the one that sampled, and "
            f"{CORRECTION}.bypass_mode=True makes them the same: every weight would be 1",
            f"set {CORRECTION}.bypass_mode=False, or {LOSS}.loss_mode=vanilla",
        )
    if teaching.enabled and not teaching.distillation_loss.use_policy_gradient:
        problems.add(
            f"{LOSS}.loss_mode=decoupled corrects its own loss for older samples, but not that of the teachers beside it",
            f"set distillation.distillation_loss.use_policy_gradient=True, or {CORRECTION}.rollout_is=token with another loss",
        )


def _estimators(config: Config, problems: Problems) -> None:
    algorithm = config.algorithm
    if algorithm.adv_estimator == "gdpo":
        _gdpo(config, problems)
    withheld = (
        algorithm.rollout_correction.bypass_mode or config.actor_rollout_ref.actor.calculate_sum_pi_squared is False
    )
    if algorithm.adv_estimator in TOKEN_BASELINES and withheld:
        problems.add(
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs Σπ² of every token, from the pass for old log-probs",
            f"set {CORRECTION}.bypass_mode=False and leave actor.calculate_sum_pi_squared alone",
        )


def _gdpo(config: Config, problems: Problems) -> None:
    """It reads the rewards that it compares, and no score that something else was added to."""
    algorithm, keys = config.algorithm, config.algorithm.gdpo_reward_keys
    if not keys:
        problems.add(
            "algorithm.adv_estimator=gdpo compares several rewards, and algorithm.gdpo_reward_keys names none",
            "set it to keys of the dict that your reward function returns, e.g. [accuracy,format]",
        )
    weights = algorithm.gdpo_reward_weights
    if weights is not None and len(weights) != len(keys):
        problems.add(
            f"algorithm.gdpo_reward_weights has {len(weights)} weights for {len(keys)} of algorithm.gdpo_reward_keys",
            "give one for each",
        )
    for key, added, instead in (
        ("algorithm.use_kl_in_reward=True", algorithm.use_kl_in_reward, f"set {ACTOR}.use_kl_loss=True instead"),
        (
            f"algorithm.length_reward={algorithm.length_reward}",
            algorithm.length_reward is not None,
            "return it from the reward function, as one more of algorithm.gdpo_reward_keys",
        ),
        (
            "reward_model.enable=True",
            need_reward_model(config),
            "remove it: only what a reward function returns is compared",
        ),
    ):
        if added:
            problems.add(f"{key} changes the score, which algorithm.adv_estimator=gdpo does not read", instead)
