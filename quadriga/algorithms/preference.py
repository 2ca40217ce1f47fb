"""Losses on pairs of answers of which one is preferred. Each returns one value a pair, `[pairs]`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import ConfigError

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
