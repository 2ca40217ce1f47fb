"""Losses of `verl.trainer.ppo.core_algos` that look at all rows before they weigh a token: by covariance, and bypass_mode.

The rows of a call count as the whole mini-batch, as they do in verl.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.token_choice import random_priorities, select_by_covariance
from quadriga.compat.verl.core_algos import _policy_loss, _read
from quadriga.compat.verl.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

Told = tuple[Tensor, dict[str, Any]]
CHOICE_KEYS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio")
CLIP_KEYS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
CORRECTION_KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)


def _by_covariance(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Told:
    """`clip_cov` and `kl_cov`: the draw among tokens depends on torch's random state."""
    own = _read(config, "policy_loss")
    options = {key: _read(own, key) for key in CHOICE_KEYS} | {key: _read(config, key) for key in CLIP_KEYS}
    chosen = select_by_covariance(
        name,
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
        priority=random_priorities(response_mask.long(), log_prob.shape[-1], int(torch.randint(2**31, ()))),
        **{key: value for key, value in options.items() if value is not None},
    )
    call = old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    return _policy_loss(name, *call, cov_selected=chosen)


compute_policy_loss_clip_cov = partial(_by_covariance, "clip_cov")
compute_policy_loss_kl_cov = partial(_by_covariance, "kl_cov")


def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Told:
    """The plain policy gradient, −A·log_prob, times the importance weights where there are some."""
    call = rollout_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    return _policy_loss("gpg", *call)


def compute_policy_loss_bypass_mode(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Told:
    """`old_log_prob` is the rollout's. With `ppo_clip` the clipped ratio is the correction, with `reinforce` the weights are.

    Rows and tokens that `rollout_rs` rejects leave the mask in both. `rollout_is_weights` is not read: weights are made here.

    Raises:
        ValueError: config.policy_loss has no rollout_correction, or its loss_type is unknown.
    """
    correction = _read(_read(config, "policy_loss"), "rollout_correction")
    if correction is None:
        raise ValueError("bypass_mode needs policy_loss.rollout_correction in its config: call apply_bypass_mode first")
    kind = _read(correction, "loss_type", "ppo_clip")
    if kind not in ("ppo_clip", "reinforce"):
        raise ValueError(f"unknown loss_type {kind!r} of rollout_correction; known: ppo_clip, reinforce")
    options = {key: _read(correction, key) for key in CORRECTION_KEYS}
    with torch.no_grad():
        made, mask, figures = compute_rollout_correction_and_rejection_mask(
            log_prob, old_log_prob, response_mask, **{key: v for key, v in options.items() if v is not None}
        )
    weights = made.batch["rollout_is_weights"] if made is not None and kind == "reinforce" else None
    if kind == "reinforce":
        loss, told = compute_policy_loss_reinforce(
            old_log_prob, log_prob, advantages, mask, loss_agg_mode, config, weights
        )
    else:
        loss, told = _policy_loss("vanilla", old_log_prob, log_prob, advantages, mask, loss_agg_mode, config)
    return loss, told | figures
