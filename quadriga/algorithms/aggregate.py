"""From a loss per token to one number, so that the pieces of a mini-batch add up to the whole.

The counts are those of the whole mini-batch over all ranks and are passed in. A micro-batch never normalises by its
own, and so the sum over any partition of the rows into micro-batches and ranks is the value, and the gradient, of the
whole mini-batch. (Where gradients are averaged over ranks rather than added, multiply the loss by the number of ranks.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from torch import Tensor

from quadriga.algorithms.masked import as_bool, masked_sum, token_counts
from quadriga.errors import ConfigError, DataError

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
AGGREGATION_MODES: tuple[str, ...] = get_args(AggregationMode)

# What the papers use. It is a default only: a configured mode is always honoured.
_DEFAULT_MODES = {
    "gspo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
}


def default_agg_mode(loss_mode: str) -> str:
    """The aggregation that a policy loss's paper uses, for when `actor.loss_agg_mode` is left unset."""
    return _DEFAULT_MODES.get(loss_mode, "token-mean")


@dataclass(frozen=True)
class Aggregation:
    """How a per-token loss `[B, T]` becomes a scalar. With ℓ the loss, N tokens and S sequences in the mini-batch:

    - `token-mean`: Σ ℓ / N (DAPO, Yu et al. 2025, arXiv 2503.14476)
    - `token-sum`: Σ ℓ
    - `seq-mean-token-sum`: Σ_i Σ_t ℓ / S
    - `seq-mean-token-mean`: Σ_i (Σ_t ℓ / len_i) / S (GRPO, Shao et al. 2024, arXiv 2402.03300)
    - `seq-mean-token-sum-norm`: Σ_i Σ_t ℓ / (S · c) (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)

    A row without tokens contributes 0 and does not count as a sequence. A mini-batch without tokens has loss 0.

    Attributes:
        mode: one of the above.
        num_tokens: N, tokens with mask 1 in the whole mini-batch, over all ranks.
        num_sequences: S, rows with at least one such token in the whole mini-batch, over all ranks.
        loss_scale_factor: the constant c.
        response_length: c where `loss_scale_factor` is None: the response length to which the mini-batch is padded.
            It is one number for all micro-batches, whatever they themselves are padded to.
        token_weights: constants `[B, T]` that multiply the loss of these rows' tokens; see `weighted`.
    """

    mode: str
    num_tokens: float
    num_sequences: float
    loss_scale_factor: float | None = None
    response_length: int | None = None
    token_weights: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in AGGREGATION_MODES:
            raise ConfigError(
                f"Unknown loss aggregation {self.mode!r}. Known: {', '.join(AGGREGATION_MODES)}.",
                "set actor_rollout_ref.actor.loss_agg_mode to one of them",
            )
        if self.num_tokens < 0 or self.num_sequences < 0:
            raise DataError(f"Negative counts: {self}.", "give the counts of the whole mini-batch over all ranks")
        if self.mode == "seq-mean-token-sum-norm" and not self._constant() > 0:
            raise ConfigError(
                "The aggregation seq-mean-token-sum-norm divides by a positive constant, and none was given.",
                "set actor_rollout_ref.actor.loss_scale_factor, or pass response_length",
            )

    @classmethod
    def of_batch(cls, mode: str, mask: Tensor, loss_scale_factor: float | None = None) -> Aggregation:
        """The aggregation of a mini-batch of which the whole `mask[B, T]` is at hand."""
        tokens, sequences = count_tokens_and_sequences(mask)
        return cls(mode, tokens, sequences, loss_scale_factor, response_length=mask.shape[-1])

    def weighted(self, token_weights: Tensor) -> Aggregation:
        """The same, with each token's loss multiplied by a constant `[B, T]`; a token of weight 0 stays in every divisor."""
        if self.token_weights is not None:
            token_weights = token_weights * self.token_weights
        return replace(self, token_weights=token_weights.detach())

    def __call__(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """The scalar share of these rows (`per_token[B, T]`, `mask[B, T]`) in the mini-batch's value."""
        if self.token_weights is not None:
            per_token = per_token * self.token_weights
        if self.mode == "token-mean":
            return masked_sum(per_token, mask) / max(self.num_tokens, 1)
        if self.mode == "token-sum":
            return masked_sum(per_token, mask)
        per_sequence = masked_sum(per_token, mask, dim=-1)
        if self.mode == "seq-mean-token-mean":
            per_sequence = per_sequence / token_counts(mask).clamp(min=1)
        elif self.mode == "seq-mean-token-sum-norm":
            per_sequence = per_sequence / self._constant()
        return per_sequence.sum() / max(self.num_sequences, 1)

    def token_mean(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """Share of these rows in the mini-batch's mean over tokens, whatever the mode. For metrics: no gradient."""
        return masked_sum(per_token.detach(), mask) / max(self.num_tokens, 1)

    def _constant(self) -> float:
        constant = self.response_length if self.loss_scale_factor is None else self.loss_scale_factor
        return constant or 0


def count_tokens_and_sequences(mask: Tensor) -> tuple[int, int]:
    """Tokens, and rows with at least one, of `mask[B, T]`; to be added up over ranks for `Aggregation`."""
    counts = token_counts(as_bool(mask))
    return int(counts.sum()), int(counts.count_nonzero())


def entropy_bonus(*, entropy: Tensor, response_mask: Tensor, loss_agg: Aggregation) -> tuple[Tensor, dict[str, Tensor]]:
    """The aggregated entropy H of `entropy[B, T]`; the policy loss becomes L − `actor.entropy_coeff` · H.

    Returns the share of these rows in H, with gradient, and `actor/entropy`, the mean over tokens.
    """
    return loss_agg(entropy, response_mask), {"actor/entropy": loss_agg.token_mean(entropy, response_mask)}
