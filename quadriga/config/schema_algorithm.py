"""The part of the schema about what is optimised: advantages, KL, corrections, teachers. See `schema.py`."""

# ruff: noqa: RUF009  (key and section return dataclass fields, which is what a dataclass default must be)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.config.fields import LONGEST, LONGEST_S, MOST_PROCESSES, SHORTEST_S, key, section
from quadriga.config.names import (
    ADV_ESTIMATORS,
    DISTILLATION_LOSSES,
    DISTILLATION_TAILS,
    DIVIDED_BY_DEVIATION,
    KL_ESTIMATORS,
    LENGTH_REWARDS,
    PF_PPO_METHODS,
    TOKEN_BASELINES,
)
from quadriga.config.schema_models import ProfilerConfig


@dataclass
class KLControlConfig:
    type: str = key("fixed", "keep kl_coef, or adapt it towards target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight of the KL penalty (its start, when adaptive)", at_least=0)
    horizon: int = key(10000, "rows over which the weight may move", unit="rows", at_least=1, only_if=".type=adaptive")
    target_kl: float = key(0.1, "KL to steer to", unit="nats per token", at_least=1e-6, only_if=".type=adaptive")


@dataclass
class FilterGroupsConfig:
    enable: bool = key(False, "dynamic sampling: drop groups whose answers all score the same and draw further prompts")
    metric: str = key("score", "what must differ inside a group: score, or a key of the reward's extra information")
    max_num_gen_batches: int = key(10, "give up after so many generation batches for one step", at_least=1)


@dataclass
class RolloutCorrectionConfig:
    rollout_is: str | None = key(
        None,
        "importance weights trainer/rollout, by token or sequence; null: none",
        choices=("token", "sequence"),
        only_if=".bypass_mode!=True or .loss_type=reinforce",
    )
    rollout_is_threshold: float | str = key(
        2.0,
        "truncate the weights at this value; two as lo_hi (0.5_2.0): set those outside to 0",
        at_least=1e-3,
        only_if=".rollout_is and .bypass_mode!=True or .loss_type=reinforce",
    )
    rollout_is_batch_normalize: bool = key(
        False,
        "divide the weights by their mean",
        only_if=".rollout_is and .bypass_mode!=True or .loss_type=reinforce",
    )
    rollout_rs: str | None = key(
        None,
        "reject tokens or sequences by {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}, several with commas; null: none",
    )
    rollout_rs_threshold: float | str | None = key(
        None,
        "bounds of rollout_rs, one for each name or for all: C or lo_hi of the ratio for k1, else upper",
        only_if=".rollout_rs",
    )
    bypass_mode: bool | None = key(
        None,
        "take the rollout's log-probs as the old ones instead of recomputing them; null: where samples come from older "
        "weights, nothing else corrects them and the loss clips",
    )
    loss_type: str = key(
        "ppo_clip",
        "with bypass_mode: the policy loss on that ratio, or the plain policy gradient times the importance weights",
        choices=("ppo_clip", "reinforce"),
    )
    m2po_threshold: float | None = key(
        None,
        "drop the tokens of largest squared log-ratio until its mean is below this (0.04); null: none",
        at_least=1e-6,
    )


@dataclass
class PFPPOConfig:
    reweight_method: str = key(
        "pow", "chance of a row: by abs(score)^weight_pow, or by its rank", choices=PF_PPO_METHODS
    )
    weight_pow: float = key(2.0, "exponent of pow", at_least=0)


@dataclass
class GiGPOConfig:
    step_weight: float = key(1.0, "weight of the comparison of single steps", at_least=0)
    gamma: float = key(0.95, "discount per step", at_least=0, at_most=1)
    norm_steps_by_std: bool = key(False, "divide that comparison by its standard deviation")


@dataclass
class AlgorithmConfig:
    adv_estimator: str = key(
        "gae", "advantage estimator; gae has a critic", choices=ADV_ESTIMATORS, own="module:function"
    )
    gamma: float = key(
        1.0, "discount per token", at_least=0, at_most=1, only_if=".adv_estimator=gae|reinforce_plus_plus"
    )
    lam: float = key(1.0, "lambda of GAE", at_least=0, at_most=1, only_if=".adv_estimator=gae")
    f_norm: float = key(1.0, "divisor of the advantages", at_least=1e-6, only_if=".adv_estimator=gpg")
    norm_adv_by_std_in_grpo: bool = key(
        True,
        "divide by the group's standard deviation; False is Dr.GRPO",
        only_if=f".adv_estimator={'|'.join(DIVIDED_BY_DEVIATION)}",
    )
    gdpo_reward_keys: list[str] = key(
        [], "the rewards to compare, keys of what the reward function returns", only_if=".adv_estimator=gdpo"
    )
    gdpo_reward_weights: list[float] | None = key(None, "their weights; null: 1 each", only_if=".adv_estimator=gdpo")
    gigpo: GiGPOConfig = section(GiGPOConfig, "comparison of the steps of trajectories", only_if=".adv_estimator=gigpo")
    handle_zero_tail: bool = key(
        True,
        "no baseline where only the longest row of a group is left",
        only_if=f".adv_estimator={'|'.join(TOKEN_BASELINES)}",
    )
    use_pf_ppo: bool = key(False, "PF-PPO: draw the rows of the update with replacement, by their scores")
    pf_ppo: PFPPOConfig = section(PFPPOConfig, "how they are drawn", only_if=".use_pf_ppo=True")
    length_reward: str | None = key(None, "add a reward for short responses; null: none", choices=LENGTH_REWARDS)
    length_reward_weight: float | None = key(
        None, "its weight; null: 1.0 for kimi, 0.25 for prime_rl", at_least=1e-6, only_if=".length_reward"
    )
    overlong_filter: bool = key(False, "responses of full length leave the loss and its counts")
    use_kl_in_reward: bool = key(False, "subtract the KL to the reference from the reward")
    kl_penalty: str = key(
        "kl",
        "KL estimator in the reward",
        choices=KL_ESTIMATORS,
        own="module:function",
        only_if=".use_kl_in_reward=True",
    )
    kl_ctrl: KLControlConfig = section(
        KLControlConfig, "weight of the KL in the reward", only_if=".use_kl_in_reward=True", zero_is_off=True
    )
    filter_groups: FilterGroupsConfig = section(
        FilterGroupsConfig, "dynamic sampling of prompt groups", only_if="algorithm.filter_groups.enable=True"
    )
    rollout_correction: RolloutCorrectionConfig = section(
        RolloutCorrectionConfig, "correct for the gap between rollout and trainer log-probs"
    )


@dataclass
class DistillationLossConfig:
    loss_mode: str | None = key(
        None,
        "divergence from the teacher: of sampled tokens (+: with the gradient of the reverse KL), or on its top k; "
        "null: k1 with use_policy_gradient, else k3+",
        choices=DISTILLATION_LOSSES,
    )
    use_policy_gradient: bool = key(False, "add minus the divergence of each token to the advantages, without a loss")
    use_task_rewards: bool = key(True, "learn from the rewards too; False: from the teacher alone")
    distillation_loss_coef: float = key(
        1.0, "weight of the distillation beside the rewards", at_least=0, only_if=".use_task_rewards=True"
    )
    topk: int = key(
        128,
        "how many of the teacher's likeliest tokens",
        unit="tokens",
        at_least=1,
        at_most=LONGEST,
        only_if=".loss_mode=forward_kl_topk|jsd_topk",
    )
    tail: str = key(
        "bucket",
        "what becomes of the other tokens",
        choices=DISTILLATION_TAILS,
        only_if=".loss_mode=forward_kl_topk|jsd_topk",
    )
    jsd_beta: float = key(
        0.5,
        "share of the teacher; 0: forward KL, 1: reverse KL",
        at_least=0,
        at_most=1,
        only_if=".loss_mode=jsd_topk",
    )
    loss_max_clamp: float | None = key(
        None, "hold a token's divergence within ± this; null: no bound, 10 with use_policy_gradient", at_least=1e-6
    )
    log_prob_min_clamp: float | None = key(None, "count lower log-probs as this; null: as they are")


@dataclass
class DistillationConfig:
    enabled: bool = key(False, "learn from teachers: they say how likely the policy's own tokens are")
    teacher_models: dict[str, Any] = key(
        {},
        "NAME: {model_path: a model, a run directory or self, or endpoint: http://…/v1 with model and api_key_env; key: whose rows}",
    )
    teacher_key: str = key("data_source", "column whose value chooses the teacher by its key")
    hint: str = key(
        "none", "what the teacher sees beside the prompt: none, sibling (a successful response), or a column with text"
    )
    hint_template: str = key(
        "A solution for reference: {hint} Now answer yourself.",
        "how the hint is put, with {hint}",
        only_if=".hint!=none",
    )
    hint_min_score: float = key(1.0, "score from which a response is successful", only_if=".hint=sibling")
    nnodes: int = key(
        0,
        "nodes of a pool of the teachers' own; 0: they share the reference's",
        unit="nodes",
        at_least=0,
        at_most=MOST_PROCESSES,
    )
    n_gpus_per_node: int = key(
        1, "slots per node of that pool", unit="slots", at_least=1, at_most=MOST_PROCESSES, only_if=".nnodes"
    )
    timeout_s: float = key(
        120.0,
        "an endpoint must answer within; one that cannot be reached is asked again for a minute",
        unit="s",
        at_least=SHORTEST_S,
        at_most=LONGEST_S,
    )
    max_concurrent: int = key(16, "requests to endpoints at the same time", at_least=1, at_most=MOST_PROCESSES)
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig, "how it is learnt")
    profiler: ProfilerConfig = section(ProfilerConfig, "profile of this role")
