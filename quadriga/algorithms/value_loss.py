"""The critic's loss."""

from __future__ import annotations

import torch
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
