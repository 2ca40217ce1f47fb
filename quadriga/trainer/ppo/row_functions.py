"""What the driver computes from whole columns of a batch, as functions that run wherever those columns are.

Each takes the rows and returns new columns and figures. `RayPPOTrainer.compute` calls them: in the driver, or, with
`transfer_queue.enable`, in a worker, so that the columns need not come to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms import apply_kl_penalty, compute_advantage, correct_rollout, group_ids_from_uids
from quadriga.algorithms.distillation import distillation_advantage
from quadriga.algorithms.shaping import length_reward
from quadriga.algorithms.token_choice import dropped_share, second_moment_mask
from quadriga.config.distillation import divergence_of
from quadriga.config.schema_algorithm import AlgorithmConfig, DistillationConfig, RolloutCorrectionConfig
from quadriga.data.ragged import balance_over_ranks
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.trainer.ppo.contexts import CONTEXT_COLUMNS, by_episode
from quadriga.trainer.ppo.step_metrics import batch_metrics, warning_signs


def groups_that_differ(batch: DataProto, metric: str, n: int) -> np.ndarray:
    """For each prompt, whether its `n` samples do not all have the same `metric`: `score`, or what the reward tells."""
    if metric == "score":
        values = batch.batch["score"].numpy()
    else:
        column = f"reward_{metric}"
        if column not in batch.non_tensor_batch:
            told = [k for k in batch.non_tensor_batch if k.startswith("reward_") and k != "reward_model"]
            raise DataError(
                f"algorithm.filter_groups.metric={metric}: the reward does not tell it",
                f"it tells {', '.join(k.removeprefix('reward_') for k in told)}",
            )
        values = batch.non_tensor_batch[column].astype(float)
    grouped = values.reshape(-1, n)
    return (grouped != grouped[:, :1]).any(1)


def layout(lengths: Sequence[int], mini_batches: int, world_size: int, balance: bool) -> np.ndarray:
    """An order of the rows in which equal contiguous chunks go to the ranks.

    Mini-batch k is made of the k-th of `mini_batches` equal parts of the batch, and of the k-th part of every rank's chunk:
    whatever rank a row goes to, it stays in its mini-batch. With `balance`, the ranks' token counts are nearly equal.
    """
    rows = np.arange(len(lengths)).reshape(mini_batches, world_size, -1)
    if balance and world_size > 1:
        return np.array(balance_over_ranks(lengths, world_size, len(lengths) // mini_batches))
    return rows.swapaxes(0, 1).ravel()


Computed = tuple[dict[str, Tensor], dict[str, float]]


def computed(function: Callable[..., Computed], arguments: dict[str, Any], rows: DataProto) -> DataProto:
    """What `function(rows, **arguments)` returns, as a table of the new columns with `figures` in its meta_info."""
    columns, figures = function(rows, **arguments)
    return DataProto.from_dict(columns, meta_info={"figures": figures})


SCORE_COLUMNS = (
    "response_mask",
    "response_lengths",
    "row_scores",
    "reward_tensor",
    "rm_scores",
    "turn_rewards",
    "other_rewards",
)


def total_scores(rows: DataProto) -> Computed:
    """`token_level_scores` `[B, R]`, the reward function's plus the reward model's, and their sum over an episode, `score` `[B]`.

    A reward function has told a number a row (`row_scores`), which belongs to the last token, or a tensor (`reward_tensor`).
    Agents may have rewarded turns (`turn_rewards`).
    """
    tensors = rows.batch
    scores = tensors.get("reward_tensor")
    if "row_scores" in tensors.keys():  # noqa: SIM118 (a TensorDict is no dict)
        lengths = tensors["response_lengths"]
        scores = torch.zeros(tensors["response_mask"].shape)
        nonempty = (lengths > 0).nonzero(as_tuple=True)[0]
        scores[nonempty, lengths[nonempty] - 1] = tensors["row_scores"][nonempty]
    for said in (tensors.get("rm_scores"), tensors.get("turn_rewards")):
        if said is not None:
            scores = said + (torch.zeros_like(said) if scores is None else scores)
    score = scores.sum(1)
    if "other_rewards" in tensors.keys():  # noqa: SIM118
        score = score + tensors["other_rewards"]
    return {"token_level_scores": scores, "score": score}, {}


CORRECTION_COLUMNS = (
    "old_log_probs",
    "rollout_log_probs",
    "rollout_sampled_log_probs",
    "response_mask",
    "token_versions",
)


def corrected(rows: DataProto, correction: RolloutCorrectionConfig, version: int) -> Computed:
    """Old log-probs taken from the rollout, where asked for; importance weights and a stricter response mask.

    With bypass_mode nothing was recomputed: the update compares the policy of now with the rollout (`MiniBatchView`).
    `version` is that of the policy before the update.
    """
    tensors = rows.batch
    sampled = tensors.get("rollout_sampled_log_probs", tensors["rollout_log_probs"])  # what was sampled from
    if correction.bypass_mode:
        return {"old_log_probs": sampled}, {}
    columns: dict[str, Tensor] = {}
    found = correct_rollout(
        old_log_prob=tensors["old_log_probs"],
        rollout_log_prob=sampled,
        response_mask=tensors["response_mask"],
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
        token_versions=tensors.get("token_versions"),
        version=version,
    )
    figures = {name: float(value) for name, value in found.metrics.items()}
    if found.weights is not None:
        columns["rollout_is_weights"] = found.weights
    columns["response_mask"] = found.mask.long()
    if correction.m2po_threshold is not None:
        columns["token_weights"] = second_moment_mask(
            old_log_prob=tensors["old_log_probs"],
            rollout_log_prob=sampled,
            response_mask=found.mask,
            threshold=correction.m2po_threshold,
        )
        figures["rollout_corr/m2po_dropped"] = float(dropped_share(columns["token_weights"], found.mask))
    return columns, figures


GENERATED_COLUMNS = ("attention_mask", "response_mask", "token_level_scores", "cut_off", *CONTEXT_COLUMNS)


@by_episode
def generated_figures(rows: DataProto, max_response_length: int, max_prompt_length: int) -> Computed:
    """Scores and lengths of rows, and no columns."""
    scores = rows.batch["token_level_scores"]
    unknown = dict.fromkeys(("advantages", "returns"), torch.zeros_like(scores))
    tensors = {name: rows.batch[name] for name in rows.batch.keys()}  # noqa: SIM118
    scored = {**tensors, "token_level_rewards": scores, **unknown}
    figures = batch_metrics(scored, max_response_length, max_prompt_length)
    return {}, {
        name: value for name, value in figures.items() if not name.startswith(("critic/advantages", "critic/returns"))
    }


ADVANTAGE_COLUMNS = (
    "responses",
    "attention_mask",
    "response_mask",
    "token_level_scores",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "reward_baselines",
    "response_lengths",
    "cut_off",
    "rollout_log_probs",
    "teacher_index",
    "teacher_mask",
    "teacher_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
    *CONTEXT_COLUMNS,
)
TRAJECTORY_COLUMNS = {"trajectory_uid": "trajectory_ids", "turn_index": "step_ids", "observation": "observation_ids"}
"""Columns of runs with one row a step, and what the estimators call them."""


def advantage_labels(algorithm: AlgorithmConfig, there: Collection[str]) -> list[str]:
    """The columns without tensors that `advantages` reads, of those that are `there`."""
    rewards = [f"reward_{name}" for name in algorithm.gdpo_reward_keys]
    return ["uid", *(name for name in [*rewards, *TRAJECTORY_COLUMNS] if name in there)]


@by_episode
def advantages(
    rows: DataProto,
    algorithm: AlgorithmConfig,
    kl_coef: float,
    max_response_length: int,
    max_prompt_length: int,
    distillation: DistillationConfig,
) -> Computed:
    """Rewards (scores minus KL, where asked for), advantages and returns; the figures of the batch, and its `kl`."""
    tensors, figures = rows.batch, {}
    rewards = tensors["token_level_scores"]
    if algorithm.use_kl_in_reward:
        rewards, kl = apply_kl_penalty(
            rewards,
            tensors["old_log_probs"],
            tensors["ref_log_prob"],
            tensors["response_mask"],
            algorithm.kl_penalty,
            kl_coef,
        )
        figures["actor/reward_kl_penalty"] = float(kl)
    mask, group_ids, new = tensors["response_mask"], group_ids_from_uids(rows.non_tensor_batch["uid"]), {}
    if algorithm.length_reward is not None:
        added = length_reward(
            algorithm.length_reward,
            scores=rewards.sum(1),
            lengths=mask.sum(1),
            group_ids=group_ids,
            weight=algorithm.length_reward_weight,
        )
        rewards = _on_last_token(rewards, added, tensors["response_lengths"])
        figures["reward/length_mean"] = float(added.mean())
    if algorithm.overlong_filter:
        cut = tensors.get("cut_off", tensors["response_lengths"] >= max_response_length).bool()
        mask = new["response_mask"] = mask.masked_fill(cut.unsqueeze(-1), 0)
        figures["response_length/filtered"] = float(cut.float().mean())
    rewarded = not distillation.enabled or distillation.distillation_loss.use_task_rewards
    if not (rewarded and mask.any()):  # filter and rejection may leave nothing to judge
        advantage = returns = torch.zeros_like(rewards)
    else:
        advantage, returns = estimated(rows, rewards, mask, group_ids, algorithm, figures)
    if distillation.enabled:
        taught, of_teachers = distilled(tensors, mask, distillation)
        advantage, figures = advantage + taught, figures | of_teachers
    new |= {"advantages": advantage, "returns": returns}
    told = {**{name: tensors[name] for name in tensors.keys()}, "token_level_rewards": rewards, **new}  # noqa: SIM118
    signs = warning_signs(told, rows.non_tensor_batch["uid"])
    return new, figures | batch_metrics(told, max_response_length, max_prompt_length) | signs


def distilled(tensors: Any, mask: Tensor, distillation: DistillationConfig) -> tuple[Tensor, dict[str, float]]:
    """What the teachers add to the advantages, `[B, R]` (0 where they speak through the loss), and how far off each of them
    finds the student: the reverse KL on its sampled tokens, and the share of them that it judges."""
    options = distillation.distillation_loss
    judged = mask.bool() & tensors["teacher_mask"].bool()
    student = tensors.get("old_log_probs", tensors["rollout_log_probs"])
    gap = torch.where(judged, student - tensors["teacher_log_probs"], 0)
    figures = {}
    for index, name in enumerate(distillation.teacher_models):
        own = judged & (tensors["teacher_index"] == index).unsqueeze(-1)
        if own.any():
            figures[f"distillation/{name}/reverse_kl"] = float(gap[own].mean())
            figures[f"distillation/{name}/tokens"] = float(own.sum() / mask.bool().sum().clamp(min=1))
    if not options.use_policy_gradient:
        return torch.zeros_like(gap), figures
    advantage = distillation_advantage(
        student,
        tensors["teacher_log_probs"],
        judged,
        divergence_of(options),
        options.loss_max_clamp,
        options.log_prob_min_clamp,
    )
    return advantage * (options.distillation_loss_coef if options.use_task_rewards else 1.0), figures


def estimated(
    rows: DataProto,
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    algorithm: AlgorithmConfig,
    figures: dict[str, float],
) -> tuple[Tensor, Tensor]:
    """Advantages and returns by the configured estimator, which may add figures of its own."""
    tensors = rows.batch
    return compute_advantage(
        algorithm.adv_estimator,
        token_level_rewards=rewards,
        response_mask=mask,
        group_ids=group_ids,
        old_log_prob=tensors.get("old_log_probs"),
        sum_pi_squared=tensors.get("sum_pi_squared"),
        rollout_is_weights=tensors.get("rollout_is_weights"),
        reward_components=_components(rows, algorithm.gdpo_reward_keys),
        gdpo_reward_weights=algorithm.gdpo_reward_weights,
        handle_zero_tail=algorithm.handle_zero_tail,
        **_steps(rows),
        **{f"gigpo_{name}": value for name, value in vars(algorithm.gigpo).items()},
        metrics=figures,
        values=tensors.get("values"),
        reward_baselines=tensors.get("reward_baselines"),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        f_norm=algorithm.f_norm,
    )


def _on_last_token(rewards: Tensor, added: Tensor, lengths: Tensor) -> Tensor:
    """`rewards[B, R]` with a number `[B]` more on each row's last token; rows without tokens get none."""
    rewards = rewards.clone()
    some = (lengths > 0).nonzero(as_tuple=True)[0]
    rewards[some, lengths[some] - 1] += added[some].to(rewards.dtype)
    return rewards


def _components(rows: DataProto, names: list[str]) -> dict[str, Tensor] | None:
    """The rewards that gdpo compares, `[B]` each, from what the reward function told beside the score."""
    if not names:
        return None
    told = rows.non_tensor_batch
    components = {}
    for name in names:
        values = told.get(f"reward_{name}")
        if values is None or any(value is None for value in values):
            raise DataError(
                f"algorithm.gdpo_reward_keys names {name!r}, which the reward function did not return for every row",
                "return a dict with that key and a number for every sample, also for a wrong one",
            )
        components[name] = torch.tensor([float(value) for value in values], dtype=torch.float64)
    return components


def _steps(rows: DataProto) -> dict[str, Tensor]:
    """Where the rows are steps of trajectories: which, and what was seen."""
    return {
        argument: group_ids_from_uids(column) if argument != "step_ids" else torch.tensor([int(k) for k in column])
        for name, argument in TRAJECTORY_COLUMNS.items()
        if (column := rows.non_tensor_batch.get(name)) is not None
    }
