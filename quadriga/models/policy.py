"""The policy: a causal language model that turns packed rows into log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from quadriga.errors import DataError
from quadriga.models.logprobs import LogitTransform, token_log_probs
from quadriga.models.packing import PackedRows
from quadriga.models.token_model import TokenModel, select_rows


class PolicyModel(TokenModel):
    """A Hugging Face causal LM, called on packed rows. It is one module, so that sharding sees one forward pass.

    Args:
        causal_lm: the model, or a peft model around it; with the attention of `attention.py`.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._transform = logit_transform(self.huggingface.config)

    @property
    def huggingface(self) -> Any:
        """The Hugging Face model itself, without peft's wrapper."""
        return self.causal_lm.get_base_model() if self.has_adapter else self.causal_lm

    @property
    def has_adapter(self) -> bool:
        return hasattr(self.causal_lm, "peft_config")

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """The model it started from, for the reference log-probs. DataError without an adapter."""
        if not self.has_adapter:
            raise DataError("the policy has no adapter to switch off", "load the reference as a model of its own")
        with self.causal_lm.disable_adapter():
            yield

    def forward(
        self,
        packed: PackedRows,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
        other_ids: Tensor | None = None,
        top_k: int = 0,
        top_of: int | None = None,
    ) -> dict[str, Tensor]:
        """`log_probs` and, if asked for, `entropy` and `sum_pi_squared` of the packed response tokens, `[N]` float32 each;
        `other_log_probs` of `other_ids[N, K]`, and the likeliest `top_ids` of the first `top_of`, with `top_log_probs`, `[N, k]`."""
        hidden = self.last_hidden_state(packed)
        head = self.huggingface.get_output_embeddings()
        told = token_log_probs(
            select_rows(hidden, packed.predictors),
            head.weight,
            packed.targets,
            bias=getattr(head, "bias", None),
            transform=replace(self._transform, temperature=temperature),
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            other_ids=other_ids,
            top_k=top_k,
            top_of=top_of,
        )
        return {name: values for name, values in told._asdict().items() if values is not None}


def logit_transform(config: Any) -> LogitTransform:
    """What the model does to its logits, from the names that Hugging Face configs use for it."""
    config = config.get_text_config()
    scale = 1.0
    if (factor := getattr(config, "logit_scale", None)) is not None:
        scale *= float(factor)
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        scale /= float(divisor)
    softcap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(scale=scale, softcap=None if softcap is None else float(softcap))
