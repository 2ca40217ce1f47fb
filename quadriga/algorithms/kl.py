"""KL divergence to the reference policy: estimators, penalty in the reward, loss, and controllers of its coefficient.

The estimators (Schulman 2020, Approximating KL Divergence) see only the sampled token; d = log_prob − ref_log_prob:

- `k1`, `kl`: d
- `abs`: |d|
- `k2`, `mse`: d² / 2
- `k3`, `low_var_kl`: exp(−d) + d − 1 with d within ±20 and the result at most 10

A suffix `+` keeps the value and takes the gradient of k2, which is that of the KL itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from quadriga.algorithms.aggregate import Aggregation
from quadriga.algorithms.masked import KL_BOUND, LOG_RATIO_BOUND, as_bool, masked_mean, masked_sum, token_counts
from quadriga.errors import CheckpointError, ConfigError, DataError
from quadriga.registry import Registry

_ESTIMATORS: Registry[Callable[[Tensor], Tensor]] = Registry(
    "KL estimator", "algorithm.kl_penalty or actor_rollout_ref.actor.kl_loss_type"
)
register_kl_estimator = _ESTIMATORS.register
kl_estimator_names = _ESTIMATORS.names


def kl_estimate(logp: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), of the shape of `logp`; see the module's docstring for `kind`."""
    difference = logp - ref
    value = _ESTIMATORS.get(kind.removesuffix("+"))(difference)
    if not kind.endswith("+"):
        return value
    gradient_of = difference.square() / 2
    return value.detach() + (gradient_of - gradient_of.detach())


@register_kl_estimator("k1", "kl")
def _k1(difference: Tensor) -> Tensor:
    return difference


@register_kl_estimator("abs")
def _abs(difference: Tensor) -> Tensor:
    return difference.abs()


@register_kl_estimator("k2", "mse")
def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


@register_kl_estimator("k3", "low_var_kl")
def _k3(difference: Tensor) -> Tensor:
    d = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # expm1, as exp(−d) − 1 loses most of its digits near d = 0; the lower bound cuts off what rounding leaves below 0.
    return (torch.expm1(-d) + d).clamp(0, KL_BOUND)


@torch.no_grad()
def apply_kl_penalty(
    token_level_scores: Tensor, logp: Tensor, ref: Tensor, mask: Tensor, kind: str, beta: float
) -> tuple[Tensor, Tensor]:
    """KL in the reward (`algorithm.use_kl_in_reward`): r_t = score_t − β · kl_t on the policy's tokens.

    All tensors `[B, T]`. Returns the rewards, and the KL for the controller: the mean over rows (with tokens) of the
    mean over the row's tokens.
    """
    per_token = _masked_kl(logp, ref, mask, kind)
    rewards = token_level_scores - beta * torch.where(as_bool(mask), per_token, 0)
    lengths = token_counts(mask)
    return rewards, masked_mean(masked_sum(per_token, mask, dim=-1) / lengths.clamp(min=1), lengths > 0)


def kl_loss(
    *, log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, loss_agg: Aggregation, kind: str = "low_var_kl"
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL in the loss (`actor.use_kl_loss`, `kl_loss_type`): the policy loss becomes L + `actor.kl_loss_coef` · KL.

    All tensors `[B, T]`. Returns these rows' share of the mini-batch's aggregated KL, with gradient, and
    `actor/kl_loss`, the mean over tokens.
    """
    per_token = _masked_kl(log_prob, ref_log_prob, response_mask, kind)
    return loss_agg(per_token, response_mask), {"actor/kl_loss": loss_agg.token_mean(per_token, response_mask)}


def _masked_kl(logp: Tensor, ref: Tensor, mask: Tensor, kind: str) -> Tensor:
    """The estimate with padding cut off on the way in, so that it gets gradient 0 whatever it holds."""
    selected = as_bool(mask)
    return kl_estimate(torch.where(selected, logp, 0), torch.where(selected, ref, 0), kind)


class KLController(Protocol):
    """The coefficient β of the KL penalty, as it moves from step to step."""

    value: float

    def update(self, current_kl: float | Tensor, n_steps: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class FixedKLController:
    """β stays as configured. A checkpoint does not override it: the configuration is the truth."""

    def __init__(self, kl_coef: float) -> None:
        self.value = _coefficient(kl_coef)

    def update(self, current_kl: float | Tensor, n_steps: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"type": "fixed", "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_state(state, "fixed")


class AdaptiveKLController:
    """β follows the KL towards a target (Ziegler et al. 2019, arXiv 1909.08593).

    β ← β · (1 + clip(KL / target_kl − 1, ±0.2) · n_steps / horizon). n_steps (rows since the last update) counts as the
    horizon at most, so that one update changes β by a fifth at most and never turns it negative.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: float) -> None:
        if not (target_kl > 0 and horizon > 0):
            raise ConfigError(
                f"The adaptive KL controller got target_kl={target_kl} and horizon={horizon}.",
                "set algorithm.kl_ctrl.target_kl and algorithm.kl_ctrl.horizon above 0",
            )
        self.value = _coefficient(kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float | Tensor, n_steps: int) -> None:
        current_kl = float(current_kl)
        if not math.isfinite(current_kl):
            raise DataError(f"The KL to the reference is {current_kl}.", "look for non-finite log-probs in this step")
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * min(n_steps / self.horizon, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"type": "adaptive", "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up β where it was; target and horizon remain as configured."""
        _check_state(state, "adaptive")
        self.value = _coefficient(state["value"])


def make_kl_controller(
    type: str = "fixed", kl_coef: float = 0.001, target_kl: float = 0.1, horizon: float = 10000
) -> KLController:
    """The controller that `algorithm.kl_ctrl.{type, kl_coef, target_kl, horizon}` describes."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    if type == "adaptive":
        return AdaptiveKLController(kl_coef, target_kl, horizon)
    raise ConfigError(
        f"Unknown KL controller {type!r}. Known: adaptive, fixed.", "set algorithm.kl_ctrl.type to one of them"
    )


def _coefficient(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"The KL coefficient is {value}.", "set algorithm.kl_ctrl.kl_coef to a number ≥ 0")
    return float(value)


def _check_state(state: dict[str, Any], type: str) -> None:
    if state.get("type") != type:
        raise CheckpointError(
            f"The checkpoint's KL controller is {state.get('type')!r}, the configured one is {type!r}.",
            "set algorithm.kl_ctrl.type as in the run that wrote the checkpoint",
        )
