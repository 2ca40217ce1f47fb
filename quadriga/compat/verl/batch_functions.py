"""Functions of `verl.trainer.ppo.ray_trainer` that take a batch: recipes call them in a step of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quadriga.algorithms import apply_kl_penalty as _apply_kl_penalty
from quadriga.compat.verl.core_algos import (
    _accepted,
    _advantage,
    _plain_name,
    _read,
    compute_pf_ppo_reweight_data,
    get_adv_estimator_fn,
)
from quadriga.protocol import DataProto

OPTIONAL = ("values", "reward_baselines", "sum_pi_squared", "rollout_is_weights")
"""Columns that an estimator may ask for, under the same name here and there."""


def compute_response_mask(data: DataProto) -> torch.Tensor:
    """The part of `attention_mask` that belongs to `responses`, `[B, R]`."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


def apply_kl_penalty(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """`token_level_rewards` = scores − coefficient × KL to the reference; the controller moves on with the KL that was seen."""
    tensors = data.batch
    beta = float(kl_ctrl.value)
    rewards, kl = _apply_kl_penalty(
        tensors["token_level_scores"],
        tensors["old_log_probs"],
        tensors["ref_log_prob"],
        tensors["response_mask"],
        kl_penalty,
        beta,
    )
    tensors["token_level_rewards"] = rewards
    kl_ctrl.update(current_kl=float(kl), n_steps=len(data))
    return data, {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": beta}


def compute_advantage(
    data: DataProto,
    adv_estimator: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Adds `advantages` and `returns` by an estimator's name, verl's or one that was registered."""
    tensors, name = data.batch, _plain_name(adv_estimator)
    if "response_mask" not in tensors.keys():  # noqa: SIM118 (a TensorDict is no dict)
        tensors["response_mask"] = compute_response_mask(data)
    call: dict[str, Any] = {key: tensors.get(key) for key in OPTIONAL if tensors.get(key) is not None}
    call |= {"token_level_rewards": tensors["token_level_rewards"], "response_mask": tensors["response_mask"]}
    call |= {"index": data.non_tensor_batch.get("uid"), "config": config, "gamma": gamma, "lam": lam}
    call |= {"norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo, "old_log_probs": tensors.get("old_log_probs")}
    call |= {"non_tensor_batch": data.non_tensor_batch, "batch": tensors}
    function = get_adv_estimator_fn(name)
    plain = isinstance(function, partial) and function.func is _advantage
    if plain:
        call = {key: value for key, value in call.items() if key not in ("non_tensor_batch", "batch", "old_log_probs")}
    advantages, returns = function(**(call if plain else _accepted(function, call)))
    tensors["advantages"], tensors["returns"] = advantages, returns
    if name == "gae" and _read(config, "use_pf_ppo", False):
        options = _read(config, "pf_ppo", {})
        how = _read(options, "reweight_method", "pow"), _read(options, "weight_pow", 2.0)
        return compute_pf_ppo_reweight_data(data, *how)
    return data
