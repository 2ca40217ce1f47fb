"""Losses of models of one number: the critic's, and those on pairs of answers of which one is preferred."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.algorithms.aggregate import Aggregation
from quadriga.algorithms.masked import as_bool
from quadriga.errors import ConfigError


def value_loss(
    *,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    loss_agg: Aggregation,
    cliprange_value: float = 0.5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped value loss: ℓ = ½ · max((v − R)², (clip(v, v_old ± cliprange_value) − R)²), all `[B, T]`.

    Like the policy's clip (Schulman et al. 2017, arXiv 1707.06347), it stops a value from moving far in one step.
    Returns these rows' share of the mini-batch's loss, and metrics that add up likewise.
    """
    if not cliprange_value >= 0:
        raise ConfigError(f"critic.cliprange_value is {cliprange_value}.", "set it to a number ≥ 0")
    # Padding is cut off before anything is computed from it, so that it gets gradient 0 whatever it holds.
    values = torch.where(as_bool(response_mask), values, 0)
    near = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    plain, clipped = (values - returns).square(), (near - returns).square()
    loss = loss_agg(0.5 * torch.maximum(plain, clipped), response_mask)
    return loss, {
        "critic/vf_clipfrac": loss_agg.token_mean((clipped > plain).to(values.dtype), response_mask),
        "critic/vpred_mean": loss_agg.token_mean(values, response_mask),
    }


DPO_LOSSES = ("sigmoid", "ipo")


def pairwise_reward_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """−log σ(chosen − rejected): the Bradley–Terry likelihood of the preference, given the scores of both answers."""
    return -F.logsigmoid(chosen - rejected)


def dpo_loss(margin: Tensor, *, beta: float, loss_type: str = "sigmoid", label_smoothing: float = 0.0) -> Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290).

    Args:
        margin: `[pairs]`, (log π(chosen) − log π_ref(chosen)) − (log π(rejected) − log π_ref(rejected)), summed over the
            answer's tokens.
        beta: strength of the pull towards the reference.
        loss_type: `sigmoid`: −log σ(β·margin). `ipo` (Azar et al. 2023, arXiv 2310.12036): (margin − 1/(2β))².
        label_smoothing: for `sigmoid`, the share of preferences taken to be the wrong way round (cDPO).
    """
    if not beta > 0 or not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            f"dpo.beta={beta} and dpo.label_smoothing={label_smoothing} make no loss",
            "set dpo.beta above 0 and dpo.label_smoothing in [0, 0.5)",
        )
    if loss_type == "sigmoid":
        right, wrong = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
        return -(1 - label_smoothing) * right - label_smoothing * wrong
    if loss_type == "ipo":
        return (margin - 1 / (2 * beta)).square()
    raise ConfigError(f"unknown dpo.loss_type {loss_type!r}", f"use one of {', '.join(DPO_LOSSES)}")
