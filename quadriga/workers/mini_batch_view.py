"""What a loss must know of a whole mini-batch of all ranks before it is cut into micro-batches.

Some choices (the tokens of largest covariance or entropy) and corrections (rejection by the policy of now against the one
that sampled) depend on the policy as it is when a mini-batch begins, and on all of its rows. Then the rows take one more
pass without gradient; what it says is put together over the ranks, every rank comes to the same decision about all rows,
and keeps the columns of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.correction import correct_rollout
from quadriga.algorithms.token_choice import random_priorities, select_by_covariance, select_by_entropy
from quadriga.config.names import COVARIANCE_LOSSES
from quadriga.config.schema import Config
from quadriga.engine.engine import TrainingEngine
from quadriga.engine.sharding import rows_of_all_ranks
from quadriga.protocol import DataProto
from quadriga.workers.updates import micro_batch_limits


class MiniBatchView:
    """Adds to a mini-batch the columns that need all of it: `cov_selected`, `token_weights`, `rollout_is_weights`, `response_mask`."""

    def __init__(self, config: Config, engine: TrainingEngine) -> None:
        policy = config.actor_rollout_ref
        self.actor, self.rollout, self.engine = policy.actor, policy.rollout, engine
        self.correction, self.seed = config.algorithm.rollout_correction, config.data.seed
        self.loss = self.actor.policy_loss

    @property
    def corrects(self) -> bool:
        """With bypass_mode there is no earlier pass to compare the rollout with: the policy of now is compared."""
        weighs = self.correction.rollout_is is not None and self.correction.loss_type == "reinforce"
        return self.correction.bypass_mode is True and (weighs or self.correction.rollout_rs is not None)

    @property
    def needed(self) -> bool:
        chooses = self.loss.loss_mode in COVARIANCE_LOSSES or self.loss.entropy_top_ratio is not None
        return chooses or self.corrects

    def add(self, part: DataProto, draw: int) -> dict[str, float]:
        """Add the columns to this rank's rows of a mini-batch; returns the figures. `draw`: a number for the random choice."""
        if not self.needed:
            return {}
        whole, own = self._columns(part, draw)
        given = part.batch.get("token_weights")  # M2PO's: a token must pass both
        figures: dict[str, float] = {}
        new: dict[str, Tensor] = {}
        if self.corrects and whole["response_mask"].any():  # else everything was rejected before
            new, figures = self._corrected(whole)
        mask = new.get("response_mask", whole["response_mask"])
        if self.loss.loss_mode in COVARIANCE_LOSSES:
            new["cov_selected"] = self._by_covariance(whole, mask)
        if self.loss.entropy_top_ratio is not None:
            chosen = select_by_entropy(
                entropy=whole["entropy"],
                response_mask=mask,
                priority=whole["priority"],
                share=self.loss.entropy_top_ratio,
            )
            new["token_weights"] = chosen.float()
        for name, column in new.items():
            part.batch[name] = column[own].cpu()
        if given is not None and "token_weights" in new:
            part.batch["token_weights"] *= given
        return figures

    def _columns(self, part: DataProto, draw: int) -> tuple[dict[str, Tensor], slice]:
        """What the decisions are made of, of all ranks' rows, and which rows are this rank's."""
        limits = micro_batch_limits(self.rollout, "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
        wants_entropy = self.loss.entropy_top_ratio is not None
        statistics = self.engine.token_statistics(part, self.rollout.temperature, with_entropy=wants_entropy, **limits)
        columns: dict[str, Tensor] = {"log_probs": statistics["log_probs"]}
        if wants_entropy:
            columns["entropy"] = statistics["entropy"]
        columns["old_log_probs"] = part.batch.get("old_log_probs", statistics["log_probs"])
        columns |= {name: part.batch[name] for name in ("advantages", "response_mask")}
        ids = torch.where(part.batch["attention_mask"].bool(), part.batch["input_ids"], 0)
        columns["priority"] = random_priorities(ids, columns["response_mask"].shape[1], self.seed * 1_000_003 + draw)
        return rows_of_all_ranks(columns, self.engine.device)

    def _corrected(self, whole: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Mask and weights by π of now over μ. PPO's ratio is that weight already: only the plain gradient is weighted."""
        made = correct_rollout(
            old_log_prob=whole["log_probs"],
            rollout_log_prob=whole["old_log_probs"],
            response_mask=whole["response_mask"],
            rollout_is=self.correction.rollout_is if self.correction.loss_type == "reinforce" else None,
            rollout_is_threshold=self.correction.rollout_is_threshold,
            rollout_is_batch_normalize=self.correction.rollout_is_batch_normalize,
            rollout_rs=self.correction.rollout_rs,
            rollout_rs_threshold=self.correction.rollout_rs_threshold,
        )
        columns: dict[str, Tensor] = {"response_mask": made.mask.long()}
        if made.weights is not None:
            columns["rollout_is_weights"] = made.weights
        return columns, {name: float(value) for name, value in made.metrics.items()}

    def _by_covariance(self, whole: dict[str, Tensor], mask: Tensor) -> Tensor:
        options: dict[str, Any] = {
            name: getattr(self.loss, name) for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio")
        }
        options |= {name: getattr(self.actor, name) for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")}
        return select_by_covariance(
            self.loss.loss_mode,
            log_prob=whole["log_probs"],
            old_log_prob=whole["old_log_probs"],
            advantages=whole["advantages"],
            response_mask=mask,
            priority=whole["priority"],
            **options,
        )
