"""`verl.trainer.ppo.core_algos`: advantages, losses and KL under verl's names and with verl's arguments.

verl's estimators say `index` for the group of a row and get their keys in `config`; its losses say how token losses become
one number by `loss_agg_mode`. A group of one response has advantage 0 here (in verl its raw score).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum, StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms import (
    AdaptiveKLController as _AdaptiveKLController,
)
from quadriga.algorithms import (
    Aggregation,
    adv_estimator_names,
    compute_advantage,
    default_agg_mode,
    entropy_bonus,
    get_adv_estimator,
    get_policy_loss,
    kl_estimate,
    policy_loss_names,
    value_loss,
)
from quadriga.algorithms import (
    FixedKLController as _FixedKLController,
)
from quadriga.algorithms import (
    compute_policy_loss as _compute_policy_loss,
)
from quadriga.algorithms import (
    register_adv_est as _register_adv_est,
)
from quadriga.algorithms import (
    register_policy_loss as _register_policy_loss,
)
from quadriga.compat.verl_meanings import SEQUENCE_LOSSES

CALL = ("log_prob", "old_log_prob", "advantages", "response_mask", "loss_agg", "rollout_is_weights")
"""Arguments of a loss that come with the call; the others are keys of verl's config or of its policy_loss."""


class AdvantageEstimator(StrEnum):
    """verl's names of the estimators."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


def _plain_name(name: str | Enum) -> str:
    text = str(name.value if isinstance(name, Enum) else name)
    plain = text.removesuffix("_vectorized")
    return plain if text not in adv_estimator_names() and plain in adv_estimator_names() else text


# ---- Registries


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an estimator with verl's arguments known as `algorithm.adv_estimator=<name>`; runs of Quadriga use it too."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        def here(*, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Any = None, **inputs: Any) -> Any:
            known = _accepted(function, {"index": _index(group_ids), "config": _Keys(inputs), **inputs})
            return function(token_level_rewards=token_level_rewards, response_mask=response_mask, **known)

        _call_it_like(here, function)
        _register_adv_est(_plain_name(name_or_enum))(here)
        _OWN_ESTIMATORS[_plain_name(name_or_enum)] = function
        return function

    return keep


_OWN_ESTIMATORS: dict[str, Callable[..., Any]] = {}
_OWN_LOSSES: dict[str, Callable[..., Any]] = {}


class _Known(Mapping[str, Callable[..., Any]]):
    """A registry as verl shows it: name → function with verl's arguments."""

    def __init__(self, names: Callable[[], Iterable[str]], find: Callable[[str], Callable[..., Any]]) -> None:
        self.names, self.find = names, find

    def __getitem__(self, name: str) -> Callable[..., Any]:
        try:
            return self.find(name)
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(list(self.names()))


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> Callable[..., tuple[Tensor, Tensor]]:
    """The estimator of that name, to be called with verl's arguments.

    Raises:
        ValueError: there is none.
    """
    name = _plain_name(name_or_enum)
    if name in _OWN_ESTIMATORS:
        return _OWN_ESTIMATORS[name]
    if name not in adv_estimator_names():
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(adv_estimator_names())}")
    get_adv_estimator(name)
    return _WITH_OWN_ARGUMENTS.get(name) or partial(_advantage, name)


def register_policy_loss(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a loss with verl's arguments known as `actor.policy_loss.loss_mode=<name>`; runs of Quadriga use it too."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        def here(
            *,
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg: Aggregation,
            rollout_is_weights: Tensor | None = None,
            clip_ratio: float = 0.2,
            clip_ratio_low: float | None = None,
            clip_ratio_high: float | None = None,
            clip_ratio_c: float = 3.0,
        ) -> Any:
            config = _Keys(
                clip_ratio=clip_ratio,
                clip_ratio_low=clip_ratio if clip_ratio_low is None else clip_ratio_low,
                clip_ratio_high=clip_ratio if clip_ratio_high is None else clip_ratio_high,
                clip_ratio_c=clip_ratio_c,
                loss_agg_mode=loss_agg.mode,
                global_batch_info={
                    "dp_size": 1,
                    "batch_num_tokens": loss_agg.num_tokens,
                    "global_batch_size": loss_agg.num_sequences,
                    "loss_scale_factor": loss_agg.loss_scale_factor,
                },
            )
            loss, metrics = function(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=advantages,
                response_mask=response_mask,
                loss_agg_mode=loss_agg.mode,
                config=config,
                **_accepted(function, {"rollout_is_weights": rollout_is_weights}),
            )[:2]
            return loss, metrics if isinstance(metrics, dict) else {}

        _call_it_like(here, function)
        _register_policy_loss(name)(here)
        _OWN_LOSSES[name] = function
        return function

    return keep


def get_policy_loss_fn(name: str) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """The loss of that name, to be called with verl's arguments.

    Raises:
        ValueError: there is none.
    """
    if name in _OWN_LOSSES:
        return _OWN_LOSSES[name]
    if name in ("clip_cov", "kl_cov", "bypass_mode"):
        return __getattr__(f"compute_policy_loss_{name}")
    if name not in policy_loss_names():
        raise ValueError(f"unknown policy loss {name!r}; known: {', '.join(policy_loss_names())}")
    return partial(_policy_loss, name)


ADV_ESTIMATOR_REGISTRY = _Known(adv_estimator_names, get_adv_estimator_fn)
POLICY_LOSS_REGISTRY = _Known(policy_loss_names, get_policy_loss_fn)
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]


def _call_it_like(here: Any, function: Callable[..., Any]) -> None:
    """Name and place of `function`, but not its arguments, which functools.wraps would claim too."""
    here.__name__, here.__qualname__ = function.__name__, function.__qualname__
    here.__module__, here.__doc__ = function.__module__, function.__doc__


class _Keys(dict[str, Any]):
    """Keys that can be read as attributes, as verl's losses read their config."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _accepted(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Those of `inputs` that are given and that `function` takes."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {k: v for k, v in inputs.items() if v is not None and (takes_all or k in parameters)}


def _index(group_ids: Any) -> Any:
    return group_ids.cpu().numpy() if isinstance(group_ids, Tensor) else group_ids


# ---- Advantages


def _read(config: Any, key: str, default: Any = None) -> Any:
    if config is None:
        return default
    found = config.get(key, default) if hasattr(config, "get") else getattr(config, key, default)
    return default if found is None else found


def _advantage(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **inputs: Any,
) -> tuple[Tensor, Tensor]:
    """verl's call of an estimator; `epsilon` is Quadriga's own."""
    if index is not None:
        inputs["group_ids"] = list(index) if not isinstance(index, Tensor) else index
    for key in ("gamma", "lam", "f_norm"):
        if key not in inputs and _read(config, key) is not None:
            inputs[key] = _read(config, key)
    inputs.setdefault("norm_adv_by_std_in_grpo", _read(config, "norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo))
    return compute_advantage(
        name, token_level_rewards=token_level_rewards.float(), response_mask=response_mask, **inputs
    )


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    return _advantage("gae", token_level_rewards, response_mask, values=values, gamma=float(gamma), lam=float(lam))


compute_grpo_outcome_advantage = partial(_advantage, "grpo")
compute_grpo_vectorized_outcome_advantage = partial(_advantage, "grpo")
compute_grpo_passk_outcome_advantage = partial(_advantage, "grpo_passk")
compute_rloo_outcome_advantage = partial(_advantage, "rloo")
compute_rloo_vectorized_outcome_advantage = partial(_advantage, "rloo")
compute_opo_outcome_advantage = partial(_advantage, "opo")
compute_gpg_outcome_advantage = partial(_advantage, "gpg")
compute_reinforce_plus_plus_outcome_advantage = partial(_advantage, "reinforce_plus_plus")
compute_reinforce_plus_plus_baseline_outcome_advantage = partial(_advantage, "reinforce_plus_plus_baseline")


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    return _advantage("remax", token_level_rewards, response_mask, reward_baselines=reward_baselines, config=config)


def _token_baseline(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    told = {"sum_pi_squared": sum_pi_squared, "rollout_is_weights": rollout_is_weights}
    known: dict[str, Any] = {"old_log_prob": old_log_probs, "handle_zero_tail": handle_zero_tail, **told}
    return _advantage(name, token_level_rewards, response_mask, index, **known)


compute_optimal_token_baseline_advantage = partial(_token_baseline, "optimal_token_baseline")
compute_multi_turn_optimal_token_baseline_advantage = partial(_token_baseline, "tir_optimal_token_baseline")


def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Any = None,
    batch: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The rewards that `config.gdpo_reward_keys` names are columns of `non_tensor_batch` or of `batch`, one number a row.

    Raises:
        KeyError: there is no such column.
    """
    components = {}
    for key in _read(config, "gdpo_reward_keys") or ():
        parts = [part for part in (non_tensor_batch, batch) if part is not None and key in set(part.keys())]
        if not parts:
            raise KeyError(f"gdpo_reward_keys names {key!r}, which the batch does not have")
        components[key] = torch.tensor([float(value) for value in parts[0][key]])
    weights = _read(config, "gdpo_reward_weights")
    told = {"reward_components": components, "gdpo_reward_weights": weights, "config": config}
    return _advantage(
        "gdpo", token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo, **told
    )


_WITH_OWN_ARGUMENTS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "optimal_token_baseline": compute_optimal_token_baseline_advantage,
    "tir_optimal_token_baseline": compute_multi_turn_optimal_token_baseline_advantage,
    "gdpo": compute_gdpo_outcome_advantage,
}


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    return token_level_scores - (old_log_prob - ref_log_prob) * kl_ratio


# ---- Losses


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """One number of `loss_mat[B, T]`: counts that are not given are those of these rows.

    Raises:
        ValueError: `loss_agg_mode` is none of verl's.
    """
    from quadriga.algorithms import AGGREGATION_MODES

    if loss_agg_mode not in AGGREGATION_MODES:
        raise ValueError(f"Invalid loss_agg_mode: {loss_agg_mode}")
    whole = Aggregation.of_batch(loss_agg_mode, loss_mask, loss_scale_factor)
    aggregation = Aggregation(
        loss_agg_mode,
        whole.num_tokens if batch_num_tokens is None else float(batch_num_tokens),
        whole.num_sequences if global_batch_size is None else float(global_batch_size),
        loss_scale_factor,
        response_length=loss_mask.shape[-1],
    )
    return aggregation(loss_mat, loss_mask) * dp_size


def _aggregation(mode: str, mask: Tensor, config: Any) -> tuple[Aggregation, float]:
    """The aggregation that verl's config describes, and the number of ranks over which gradients are averaged."""
    known = _read(config, "global_batch_info") or {}
    whole = Aggregation.of_batch(mode, mask, known.get("loss_scale_factor", _read(config, "loss_scale_factor")))
    tokens, sequences = known.get("batch_num_tokens"), known.get("global_batch_size")
    aggregation = Aggregation(
        mode,
        whole.num_tokens if tokens is None else float(tokens),
        whole.num_sequences if sequences is None else float(sequences),
        whole.loss_scale_factor,
        response_length=mask.shape[-1],
    )
    return aggregation, float(known.get("dp_size") or 1)


def _policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str | None = None,
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    **inputs: Any,
) -> tuple[Tensor, dict[str, float]]:
    """verl's call of a loss; metrics are plain numbers."""
    mode = default_agg_mode(name) if name in SEQUENCE_LOSSES else loss_agg_mode or default_agg_mode(name)
    aggregation, ranks = _aggregation(mode, response_mask, config)
    for key in inspect.signature(get_policy_loss(name)).parameters:
        given = _read(config, key, _read(_read(config, "policy_loss"), key))
        if key not in CALL and given is not None:
            inputs.setdefault(key, given)
    loss, metrics = _compute_policy_loss(
        name,
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg=aggregation,
        rollout_is_weights=rollout_is_weights,
        **inputs,
    )
    return loss * ranks, {key: float(value) for key, value in metrics.items()}


compute_policy_loss_vanilla = partial(_policy_loss, "vanilla")
compute_policy_loss_gspo = partial(_policy_loss, "gspo")
compute_policy_loss_gpg = partial(_policy_loss, "gpg")
compute_policy_loss_cispo = partial(_policy_loss, "cispo")
compute_policy_loss_geo_mean = partial(_policy_loss, "geo_mean")
compute_policy_loss_sapo = partial(_policy_loss, "sapo")
compute_policy_loss_dppo_tv = partial(_policy_loss, "dppo_tv")
compute_policy_loss_dppo_kl = partial(_policy_loss, "dppo_kl")
compute_policy_loss_dro = partial(_policy_loss, "dro")


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """verl's older `compute_policy_loss`: (loss, share clipped, KL to the old policy, share clipped by the dual clip)."""
    ratio = 0.2 if cliprange is None else cliprange
    loss, metrics = _compute_policy_loss(
        "vanilla",
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg=Aggregation.of_batch(loss_agg_mode, response_mask),
        clip_ratio=ratio,
        clip_ratio_low=cliprange_low,
        clip_ratio_high=cliprange_high,
        clip_ratio_c=clip_ratio_c,
    )
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    clipped, kl, lower = (metrics[name] for name in names)
    return loss, clipped, kl, lower


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    from quadriga.compat.verl.torch_functional import entropy_from_logits

    entropy = entropy_from_logits(logits)
    aggregation = Aggregation.of_batch(loss_agg_mode, response_mask)
    return entropy_bonus(entropy=entropy, response_mask=response_mask, loss_agg=aggregation)[0]


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """(loss, share clipped)."""
    loss, metrics = value_loss(
        values=vpreds,
        old_values=values,
        returns=returns,
        response_mask=response_mask,
        loss_agg=Aggregation.of_batch(loss_agg_mode, response_mask),
        cliprange_value=cliprange_value,
    )
    return loss, metrics["critic/vf_clipfrac"]


# ---- KL


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate; `+` keeps the value and takes the gradient of k2.

    Raises:
        NotImplementedError: an estimator that verl has no code for either (`full`), or an unknown one.
    """
    from quadriga.algorithms import kl_estimator_names

    if kl_penalty.removesuffix("+") not in kl_estimator_names():
        raise NotImplementedError(kl_penalty)
    return kl_estimate(logprob, ref_logprob, kl_penalty)


kl_penalty_forward = kl_penalty


class FixedKLController(_FixedKLController):
    """A KL coefficient that stays; `value` holds it."""

    def __init__(self, kl_coef: float) -> None:
        super().__init__(kl_coef)


class AdaptiveKLController(_AdaptiveKLController):
    """A KL coefficient that moves towards `target_kl`."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(init_kl_coef, target_kl=target_kl, horizon=horizon)


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    kind = _read(kl_ctrl, "type")
    if kind == "fixed":
        return FixedKLController(kl_coef=kl_ctrl.kl_coef)
    if kind == "adaptive":
        if kl_ctrl.horizon <= 0:
            raise AssertionError(f"horizon must be larger than 0. Got {kl_ctrl.horizon}")
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise NotImplementedError(kind)


# ---- PF-PPO


def compute_pf_ppo_reweight_data(data: Any, reweight_method: str = "pow", weight_pow: float = 2.0) -> Any:
    """PF-PPO: as many rows as there are, drawn anew by their score; the draw depends on torch's random state.

    Raises:
        ValueError: an unknown `reweight_method`.
    """
    from quadriga.algorithms.shaping import pf_ppo_rows
    from quadriga.errors import ConfigError

    scores, seed = data.batch["token_level_scores"].sum(-1), int(torch.randint(2**31, ()))
    try:
        return data.select_idxs(pf_ppo_rows(scores, reweight_method=reweight_method, weight_pow=weight_pow, seed=seed))
    except ConfigError as error:
        raise ValueError(str(error)) from None


def __getattr__(name: str) -> Any:
    """The losses of `whole_losses`, which builds on this module."""
    from quadriga.compat.verl import whole_losses

    if name.startswith("compute_policy_loss_") and hasattr(whole_losses, name):
        return getattr(whole_losses, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
