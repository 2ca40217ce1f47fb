"""What the driver computes from whole columns of a batch, as functions that run wherever those columns are.

Each takes the rows and returns new columns and figures. `RayPPOTrainer.compute` calls them: in the driver, or, with
`transfer_queue.enable`, in a worker, so that the columns need not come to the driver.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms import apply_kl_penalty, compute_advantage, correct_rollout
from quadriga.config.schema import AlgorithmConfig, RolloutCorrectionConfig
from quadriga.protocol import DataProto
from quadriga.trainer.ppo.step_metrics import batch_metrics

Computed = tuple[dict[str, Tensor], dict[str, float]]

SCORE_COLUMNS = ("response_mask", "response_lengths", "row_scores", "reward_tensor", "rm_scores")


def total_scores(rows: DataProto) -> Computed:
    """`token_level_scores` `[B, R]`, the reward function's plus the reward model's, and their sum over a row, `score` `[B]`.

    A reward function has told a number a row (`row_scores`), which belongs to the last token, or a tensor (`reward_tensor`).
    """
    tensors = rows.batch
    scores = tensors.get("reward_tensor")
    if "row_scores" in tensors.keys():  # noqa: SIM118 (a TensorDict is no dict)
        lengths = tensors["response_lengths"]
        scores = torch.zeros(tensors["response_mask"].shape)
        nonempty = (lengths > 0).nonzero(as_tuple=True)[0]
        scores[nonempty, lengths[nonempty] - 1] = tensors["row_scores"][nonempty]
    said = tensors.get("rm_scores")
    if said is not None:
        scores = said + (torch.zeros_like(said) if scores is None else scores)
    return {"token_level_scores": scores, "score": scores.sum(1)}, {}


CORRECTION_COLUMNS = ("old_log_probs", "rollout_log_probs", "rollout_sampled_log_probs", "response_mask")


def corrected(rows: DataProto, correction: RolloutCorrectionConfig) -> Computed:
    """Old log-probs taken from the rollout, where asked for; importance weights and a stricter response mask."""
    tensors = rows.batch
    sampled = tensors.get("rollout_sampled_log_probs", tensors["rollout_log_probs"])  # what was sampled from
    columns = {"old_log_probs": sampled} if correction.bypass_mode else {}
    if not (correction.rollout_is or correction.rollout_rs):
        return columns, {}
    found = correct_rollout(
        old_log_prob=sampled if correction.bypass_mode else tensors["old_log_probs"],
        rollout_log_prob=sampled,
        response_mask=tensors["response_mask"],
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
    )
    if found.weights is not None:
        columns["rollout_is_weights"] = found.weights
    columns["response_mask"] = found.mask.long()
    return columns, {name: float(value) for name, value in found.metrics.items()}


ADVANTAGE_COLUMNS = (
    "attention_mask",
    "response_mask",
    "token_level_scores",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "reward_baselines",
)


def advantages(rows: DataProto, algorithm: AlgorithmConfig, kl_coef: float, max_response_length: int) -> Computed:
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
    advantage, returns = compute_advantage(
        algorithm.adv_estimator,
        token_level_rewards=rewards,
        response_mask=tensors["response_mask"],
        group_ids=rows.non_tensor_batch["uid"],
        values=tensors.get("values"),
        reward_baselines=tensors.get("reward_baselines"),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        f_norm=algorithm.f_norm,
    )
    new = {"advantages": advantage, "returns": returns}
    told = {**{name: tensors[name] for name in tensors.keys()}, "token_level_rewards": rewards, **new}  # noqa: SIM118
    return new, figures | batch_metrics(told, max_response_length)


def widened(rows: DataProto, prompt_width: int, response_width: int, pad_token_id: int) -> DataProto:
    """The rows, with prompts padded further on the left and responses on the right."""
    left = prompt_width - rows.batch["prompts"].shape[1]
    right = response_width - rows.batch["responses"].shape[1]
    columns: dict[str, Any] = {}
    for name in rows.batch.keys():  # noqa: SIM118
        column = rows.batch[name]
        if column.ndim > 1:
            before = left if name in ("prompts", "input_ids", "attention_mask", "position_ids") else 0
            after = right if name != "prompts" else 0
            value = pad_token_id if name in ("prompts", "input_ids", "responses") else 0
            column = torch.nn.functional.pad(column, (before, after), value=value)
        columns[name] = column
    return DataProto.from_dict(columns, rows.non_tensor_batch, rows.meta_info)
