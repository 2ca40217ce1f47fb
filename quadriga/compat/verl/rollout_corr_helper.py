"""`verl.trainer.ppo.rollout_corr_helper`: rollout correction with verl's calls and metric names.

The bounds of k1 are those of rollout/trainer in verl and of trainer/rollout in `quadriga.algorithms.correction`; here they
are turned around, so that numbers mean what they mean in verl.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict
from torch import Tensor

from quadriga.algorithms.correction import accepted as accepted_by
from quadriga.algorithms.correction import effective_sample_size, importance_weights
from quadriga.algorithms.masked import LOG_RATIO_BOUND, as_bool
from quadriga.compat.verl.torch_functional import masked_mean
from quadriga.config.rollout_correction import REJECTIONS, turned
from quadriga.protocol import DataProto

PREFIX = "rollout_corr/"
SUPPORTED_ROLLOUT_RS_OPTIONS = {name for name in REJECTIONS if name != "seq_max_k1"}
TOKEN_LEVEL_ROLLOUT_RS_OPTIONS = {name for name in REJECTIONS if name.startswith("token_")}
SAFETY_BOUND = LOG_RATIO_BOUND


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Weights `[B, T]` of trainer/rollout, 0 off the mask, and `rollout_is_*`. `log_ratio` is trainer − rollout.

    Raises:
        ValueError: an unknown level, or a threshold that is not above 0.
    """
    if rollout_is not in ("token", "sequence"):
        raise ValueError(f"rollout_is must be token or sequence, not {rollout_is!r}")
    lower, upper = _bounds(rollout_is_threshold)
    mask = as_bool(response_mask)
    kept = torch.where(mask, log_ratio, 0)
    log_weight = kept if rollout_is == "token" else kept.sum(-1, keepdim=True).expand_as(kept)
    raw = torch.where(mask, log_weight.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp(), 0)
    weights, _ = importance_weights(kept, mask, rollout_is, rollout_is_threshold)
    metrics = _weight_metrics(raw, weights, mask, rollout_is, lower, upper)
    if rollout_is_batch_normalize:
        rows = mask.any(-1)
        mean = masked_mean(weights, mask) if rollout_is == "token" else masked_mean(weights, mask, axis=-1)[rows].mean()
        weights = weights / mean if mean > 1e-8 else weights
        metrics["rollout_is_batch_norm_factor"] = mean.item()
    return weights.detach(), metrics


def _weight_metrics(
    raw: Tensor, weights: Tensor, mask: Tensor, level: str, lower: float | None, upper: float
) -> dict[str, float]:
    low = 1 / upper if lower is None else lower
    if not bool(mask.any()):
        return {}
    used = weights[mask]
    metrics = {
        "rollout_is_mean": used.mean().item(),
        "rollout_is_max": raw[mask].max().item(),
        "rollout_is_min": raw[mask].min().item(),
        "rollout_is_std": used.std(unbiased=False).item(),
        "rollout_is_ratio_fraction_high": (raw[mask] > upper).float().mean().item(),
        "rollout_is_ratio_fraction_low": (raw[mask] < low).float().mean().item(),
        "rollout_is_oob_ratio": ((raw[mask] > upper) | (raw[mask] < low)).float().mean().item(),
        "rollout_is_eff_sample_size": effective_sample_size(weights, mask).item(),
    }
    rows = mask.any(-1)
    per_row = masked_mean(raw, mask, axis=-1)[rows]
    return metrics | {
        "rollout_is_seq_mean": per_row.mean().item(),
        "rollout_is_seq_std": per_row.std().item() if len(per_row) > 1 else 0.0,
        "rollout_is_seq_max": per_row.max().item(),
        "rollout_is_seq_min": per_row.min().item(),
        "rollout_is_seq_max_deviation": (per_row - 1).abs().max().item(),
        "rollout_is_seq_fraction_high": (per_row > upper).float().mean().item(),
        "rollout_is_seq_fraction_low": (per_row < low).float().mean().item(),
    }


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: float | str | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mask without what was rejected, in the mask's type, and `rollout_rs_*`.

    Raises:
        ValueError: no bounds, or a name or bound that cannot be read.
    """
    from quadriga.errors import ConfigError

    if rollout_rs_threshold is None:
        raise ValueError("rollout_rs needs rollout_rs_threshold")
    mask = as_bool(response_mask)
    d = torch.where(mask, log_ratio, 0)
    names = [name.strip() for name in rollout_rs.split(",")]
    bounds = [bound.strip() for bound in str(rollout_rs_threshold).split(",")]
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    metrics: dict[str, float] = {}
    kept = mask
    try:
        for name, bound in zip(names, bounds, strict=True):
            accepted = (mask & accepted_by(d, mask, name, turned(name, bound))).expand_as(mask)
            metrics |= _rejection_metrics(name, d, mask, accepted)
            kept = kept & accepted
    except ConfigError as error:
        raise ValueError(str(error)) from None
    metrics["rollout_rs_masked_fraction"] = masked_mean((~kept).float(), mask).item()
    rows = mask.any(-1)
    metrics["rollout_rs_seq_masked_fraction"] = masked_mean((kept != mask).any(-1).float(), rows).item()
    return kept.to(response_mask.dtype), metrics


def _rejection_metrics(name: str, d: Tensor, mask: Tensor, accepted: Tensor) -> dict[str, float]:
    ratio, statistic = d.clamp(-SAFETY_BOUND, SAFETY_BOUND), name.rpartition("_")[2]
    value = -ratio if statistic == "k1" else ratio.square() / 2 if statistic == "k2" else torch.expm1(ratio) - ratio
    selected, prefix = value[mask], f"rollout_rs_{name}_"
    if not len(selected):
        return {}
    return {
        f"{prefix}mean": selected.mean().item(),
        f"{prefix}max": selected.max().item(),
        f"{prefix}min": selected.min().item(),
        f"{prefix}std": selected.std(unbiased=False).item(),
        f"{prefix}masked_fraction": masked_mean((~accepted).float(), mask).item(),
        f"{prefix}seq_masked_fraction": masked_mean((accepted != mask).any(-1).float(), mask.any(-1)).item(),
    }


def _bounds(threshold: float | str) -> tuple[float | None, float]:
    try:
        numbers = [float(part) for part in str(threshold).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) <= 0 or numbers != sorted(numbers) or math.inf in numbers:
        raise ValueError(f"rollout_is_threshold must be above 0, or lower_upper, not {threshold!r}")
    return (None if len(numbers) == 1 else numbers[0]), numbers[-1]


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> tuple[DataProto | None, Tensor, dict[str, float]]:
    """(`rollout_is_weights` in a DataProto or None, the mask without what was rejected, `rollout_corr/*`)."""
    log_ratio = (old_log_prob - rollout_log_prob).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    weights, kept = None, response_mask
    if rollout_is is not None:
        threshold = 2.0 if rollout_is_threshold is None else rollout_is_threshold
        computed, told = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, threshold, rollout_is_batch_normalize
        )
        weights = DataProto.from_dict(tensors={"rollout_is_weights": computed})
        metrics |= told
    if rollout_rs is not None:
        kept, told = compute_rollout_rejection_mask(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)
        metrics |= told
    return weights, kept, {f"{PREFIX}{name}": value for name, value in metrics.items()}


def compute_rollout_correction_and_add_to_batch(
    batch: DataProto, rollout_corr_config: Any
) -> tuple[DataProto, dict[str, float]]:
    """Weights and mask into `batch`, by the keys of `algorithm.rollout_correction`."""
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        batch.batch["response_mask"],
        *[
            rollout_corr_config.get(key, default)
            for key, default in (
                ("rollout_is", None),
                ("rollout_is_threshold", 2.0),
                ("rollout_is_batch_normalize", False),
                ("rollout_rs", None),
                ("rollout_rs_threshold", None),
            )
        ],
    )
    batch.batch["response_mask"] = kept
    if weights is not None:
        batch = batch.union(weights)
    return batch, metrics


def apply_bypass_mode(batch: DataProto, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> None:
    """The rollout's log-probs become the old ones; nothing is recomputed. The loss is told to be `bypass_mode`'s.

    Raises:
        ValueError: the batch has no `rollout_log_probs`.
    """
    if "rollout_log_probs" not in batch.batch.keys():  # noqa: SIM118 (a TensorDict is no dict)
        raise ValueError("bypass mode needs the rollout's log-probs (rollout_log_probs) in the batch")
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    if policy_loss_config is not None:
        new = {"rollout_correction": rollout_corr_config, "loss_mode": "bypass_mode"}
        if OmegaConf.is_config(policy_loss_config):
            with open_dict(policy_loss_config):
                policy_loss_config.update(new)
        else:
            for key, value in new.items():
                policy_loss_config[key] = value


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Perplexities of both policies over sequences, KL, and χ² of tokens and sequences."""
    mask = as_bool(response_mask)
    rows = mask.any(-1)
    mean_training = masked_mean(old_log_prob, mask, axis=-1)[rows]
    metrics = {
        "training_ppl": (-mean_training).exp().mean().item(),
        "training_log_ppl": (-mean_training).mean().item(),
    }
    if rollout_log_prob is None:
        return metrics
    mean_rollout = masked_mean(rollout_log_prob, mask, axis=-1)[rows]
    d = torch.where(mask, old_log_prob - rollout_log_prob, 0).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    difference = mean_rollout - mean_training
    sequence = d.sum(-1).clamp(-SAFETY_BOUND, SAFETY_BOUND)[rows]
    return metrics | {
        "kl": masked_mean(-d, mask).item(),
        "k3_kl": masked_mean(torch.expm1(d) - d, mask).item(),
        "rollout_ppl": (-mean_rollout).exp().mean().item(),
        "rollout_log_ppl": (-mean_rollout).mean().item(),
        "log_ppl_diff": difference.mean().item(),
        "log_ppl_abs_diff": difference.abs().mean().item(),
        "log_ppl_diff_max": difference.max().item(),
        "log_ppl_diff_min": difference.min().item(),
        "ppl_ratio": difference.exp().mean().item(),
        "chi2_token": masked_mean((2 * d).exp(), mask).item() - 1,
        "chi2_seq": (2 * sequence).clamp(max=SAFETY_BOUND).exp().mean().item() - 1,
    }


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """The metrics alone, with weights by token, for monitoring."""
    _, _, metrics = compute_rollout_correction_and_rejection_mask(
        log_prob, rollout_log_prob, response_mask, rollout_is="token"
    )
    return metrics
