"""The losses of actor and critic, as the training engine takes them: a share of the mini-batch's loss, and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms import compute_policy_loss, default_agg_mode, entropy_bonus, kl_loss, value_loss
from quadriga.algorithms.aggregate import Aggregation
from quadriga.algorithms.distillation import TOP_K_MODES, sampled_token_loss, top_k_loss
from quadriga.algorithms.policy_losses import LossAndMetrics
from quadriga.algorithms.token_choice import off_policy_sequence_mask
from quadriga.config.distillation import SELF, divergence_of
from quadriga.config.schema_algorithm import DistillationConfig
from quadriga.config.schema_roles import ActorConfig, CriticConfig
from quadriga.engine.engine import BatchCounts, LossFunction

TeacherLoss = Callable[[dict[str, Tensor], dict[str, Tensor], Aggregation], LossAndMetrics]
SELF_RATIO_CAP = 2.0


def actor_loss(
    actor: ActorConfig,
    *,
    max_response_length: int | None = None,
    loss_type: str = "ppo_clip",
    entropy_coeff: float | None = None,
    version: int | None = None,
    distillation: DistillationConfig | None = None,
) -> LossFunction:
    """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL + distillation.

    A batch without `old_log_probs` is strictly on-policy: the old policy is this very one, and its ratio exactly 1. Tokens
    without `token_versions` were written by the version before `version`, which this update makes.

    Args:
        max_response_length: the constant of seq-mean-token-sum-norm, where none is set.
        loss_type: `reinforce`: the plain policy gradient (times the batch's importance weights) in the policy loss's place.
        entropy_coeff: in the place of the configured one.
        distillation: where teachers take part; without task rewards the policy loss is left out, unless their advantages
            are what it learns from.
    """
    mode = "gpg" if loss_type == "reinforce" else actor.policy_loss.loss_mode
    agg_mode = actor.loss_agg_mode or default_agg_mode(mode)
    constant = actor.loss_scale_factor or max_response_length
    bonus = actor.entropy_coeff if entropy_coeff is None else entropy_coeff
    options = dict(vars(actor.policy_loss))
    delta = options.pop("opsm_delta")
    taught = distillation_loss_of(distillation) if distillation is not None else None
    has_policy_loss = taught is None or distillation.distillation_loss.use_task_rewards  # type: ignore[union-attr]

    def loss_fn(outputs: dict[str, Tensor], micro: dict[str, Tensor], counts: BatchCounts) -> Any:
        log_prob, mask = outputs["log_probs"], micro["response_mask"]
        loss_agg = counts.aggregation(agg_mode, constant)
        sampled = micro.get("rollout_sampled_log_probs", micro.get("rollout_log_probs"))
        dropping, more = loss_agg, {}
        if "token_weights" in micro:
            dropping = dropping.weighted(micro["token_weights"])
        if delta is not None:
            keep = off_policy_sequence_mask(
                log_prob=log_prob,
                rollout_log_prob=micro["rollout_log_probs"] if sampled is None else sampled,
                advantages=micro["advantages"],
                response_mask=mask,
                delta=delta,
            )
            dropping = dropping.weighted(keep)
            more["actor/opsm_dropped"] = loss_agg.token_mean(1 - keep, mask)
        versions = micro.get("token_versions")
        if versions is None and version is not None:
            versions = torch.full_like(mask, version - 1)
        loss, metrics = compute_policy_loss(
            mode,
            log_prob=log_prob,
            old_log_prob=micro.get("old_log_probs", log_prob.detach()),
            rollout_log_prob=sampled,
            advantages=micro["advantages"],
            response_mask=mask,
            loss_agg=dropping,
            rollout_is_weights=micro.get("rollout_is_weights"),
            cov_selected=micro.get("cov_selected"),
            token_versions=versions,
            version=version,
            clip_ratio=actor.clip_ratio,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            **options,
        )
        metrics |= more
        metrics["actor/pg_loss"] = loss.detach()
        if taught is not None:
            from_teacher, more = taught(outputs, micro, loss_agg)
            loss = loss + from_teacher if has_policy_loss else from_teacher
            metrics |= more
        if "entropy" in outputs:
            entropy, more = entropy_bonus(entropy=outputs["entropy"], response_mask=mask, loss_agg=loss_agg)
            metrics |= more
            if bonus:
                loss = loss - bonus * entropy
        if actor.use_kl_loss:
            kl, more = kl_loss(
                log_prob=log_prob,
                ref_log_prob=micro["ref_log_prob"],
                response_mask=mask,
                loss_agg=loss_agg,
                kind=actor.kl_loss_type,
            )
            loss = loss + actor.kl_loss_coef * kl
            metrics |= more
        if "rollout_log_probs" in micro:
            gap = (log_prob.detach() - micro["rollout_log_probs"]).abs()
            metrics["rollout/logprob_diff_mean"] = loss_agg.token_mean(gap, mask)
            if gap.numel():
                metrics["rollout/logprob_diff_max"] = gap.masked_fill(mask == 0, 0).max()
        return loss, metrics

    return loss_fn


def distillation_loss_of(section: DistillationConfig) -> TeacherLoss | None:
    """The teachers' part of the loss, with its weight; None where they speak through the advantages.

    `teacher_mask` leaves out rows that had no hint; they stay in the divisor. Sampled tokens of an older student count by
    their ratio, in self-distillation at most twice, and by the batch's importance weights.
    """
    options = section.distillation_loss
    if options.use_policy_gradient:
        return None
    mode = divergence_of(options)
    clamps = {"loss_max_clamp": options.loss_max_clamp, "log_prob_min_clamp": options.log_prob_min_clamp}
    weight = options.distillation_loss_coef if options.use_task_rewards else 1.0
    with_self = any(entry.get("model_path") == SELF for entry in section.teacher_models.values())

    def loss_fn(outputs: dict[str, Tensor], micro: dict[str, Tensor], loss_agg: Aggregation) -> LossAndMetrics:
        mask = micro["response_mask"] * micro["teacher_mask"]
        if mode in TOP_K_MODES:
            loss, metrics = top_k_loss(
                student_log_probs=outputs["other_log_probs"],
                teacher_log_probs=micro["teacher_top_log_probs"],
                response_mask=mask,
                loss_agg=loss_agg,
                loss_mode=mode,
                tail=options.tail,
                jsd_beta=options.jsd_beta,
                teacher_ids=micro["teacher_top_ids"],
                student_top_ids=outputs["top_ids"],
                **clamps,
            )
        else:
            loss, metrics = sampled_token_loss(
                log_prob=outputs["log_probs"],
                teacher_log_prob=micro["teacher_log_probs"],
                response_mask=mask,
                loss_agg=loss_agg,
                loss_mode=mode,
                old_log_prob=micro.get("old_log_probs"),
                rollout_is_weights=micro.get("rollout_is_weights"),
                ratio_cap=SELF_RATIO_CAP if with_self else None,
                **clamps,
            )
        return weight * loss, metrics

    return loss_fn


def critic_loss(critic: CriticConfig, constant: float | None = None) -> LossFunction:
    """Clipped value loss; `constant` is that of seq-mean-token-sum-norm."""

    def loss_fn(outputs: dict[str, Tensor], micro: dict[str, Tensor], counts: BatchCounts) -> Any:
        loss, metrics = value_loss(
            values=outputs["values"],
            old_values=micro["values"],
            returns=micro["returns"],
            response_mask=micro["response_mask"],
            loss_agg=counts.aggregation(critic.loss_agg_mode or "token-mean", constant),
            cliprange_value=critic.cliprange_value,
        )
        return loss, metrics | {"critic/vf_loss": loss.detach()}

    return loss_fn
