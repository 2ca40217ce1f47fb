"""The losses of actor and critic, as the training engine takes them: a share of the mini-batch's loss, and metrics."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quadriga.algorithms import compute_policy_loss, default_agg_mode, entropy_loss, kl_loss, value_loss
from quadriga.config.schema_models import ActorConfig, CriticConfig
from quadriga.engine.engine import BatchCounts, LossFunction


def actor_loss(actor: ActorConfig, with_entropy_metric: bool = True) -> LossFunction:
    """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL.

    A batch without `old_log_probs` is strictly on-policy: the old policy is this very one, and its ratio exactly 1.
    """
    mode = actor.policy_loss.loss_mode
    agg_mode = actor.loss_agg_mode or default_agg_mode(mode)

    def loss_fn(outputs: dict[str, Tensor], micro: dict[str, Tensor], counts: BatchCounts) -> Any:
        log_prob, mask = outputs["log_probs"], micro["response_mask"]
        loss_agg = counts.aggregation(agg_mode, actor.loss_scale_factor)
        loss, metrics = compute_policy_loss(
            mode,
            log_prob=log_prob,
            old_log_prob=micro.get("old_log_probs", log_prob.detach()),
            advantages=micro["advantages"],
            response_mask=mask,
            loss_agg=loss_agg,
            rollout_is_weights=micro.get("rollout_is_weights"),
            clip_ratio=actor.clip_ratio,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
        )
        metrics["actor/pg_loss"] = loss.detach()
        if "entropy" in outputs:
            entropy, told = entropy_loss(entropy=outputs["entropy"], response_mask=mask, loss_agg=loss_agg)
            metrics |= told
            if actor.entropy_coeff:
                loss = loss - actor.entropy_coeff * entropy
        if actor.use_kl_loss:
            kl, told = kl_loss(
                log_prob=log_prob,
                ref_log_prob=micro["ref_log_prob"],
                response_mask=mask,
                loss_agg=loss_agg,
                kind=actor.kl_loss_type,
            )
            loss = loss + actor.kl_loss_coef * kl
            metrics |= told
        if "rollout_log_probs" in micro:
            gap = (log_prob.detach() - micro["rollout_log_probs"]).abs()
            metrics["rollout/logprob_diff_mean"] = loss_agg.token_mean(gap, mask)
        return loss, metrics

    return loss_fn


def critic_loss(critic: CriticConfig) -> LossFunction:
    """Clipped value loss."""

    def loss_fn(outputs: dict[str, Tensor], micro: dict[str, Tensor], counts: BatchCounts) -> Any:
        loss, metrics = value_loss(
            values=outputs["values"],
            old_values=micro["values"],
            returns=micro["returns"],
            response_mask=micro["response_mask"],
            loss_agg=counts.aggregation(critic.loss_agg_mode or "token-mean"),
            cliprange_value=critic.cliprange_value,
        )
        return loss, metrics | {"critic/vf_loss": loss.detach()}

    return loss_fn
