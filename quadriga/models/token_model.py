"""What the training engine needs of a model: one forward pass over packed rows. The policy, and models of one number a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import DataError
from quadriga.models.exact import is_exact
from quadriga.models.logprobs import LogitTransform, token_log_probs
from quadriga.models.packing import PackedRows
from quadriga.models.weight_reader import WeightReader


class TokenModel(nn.Module):
    """A Hugging Face model in a module of our own, so that sharding sees one forward pass from tokens to results.

    `forward(packed, **options)` returns float32 tensors by name, `[N]` for the N wanted response tokens.
    """

    reader: WeightReader | None = None
    """Reads the weights of an outline, once it is sharded; None: the weights are there."""

    @property
    def huggingface(self) -> Any:
        """The Hugging Face model inside, whose names its weights go by."""
        raise AttributeError(f"{type(self).__name__} does not say which Hugging Face model it holds")

    @property
    def trunk_module(self) -> nn.Module:
        """The part that maps tokens to hidden states."""
        return self.huggingface.base_model

    def last_hidden_state(self, packed: PackedRows) -> Tensor:
        """`[T, hidden]` of the packed tokens."""
        output = self.trunk_module(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=None,
            use_cache=False,
            layout=packed.layout,
        )
        return output.last_hidden_state.squeeze(0)


def select_rows(hidden: Tensor, index: Tensor) -> Tensor:
    """`hidden[index]`, whose gradient is the same in every run on CUDA too: n responses begin after one prompt token."""
    if not (hidden.is_cuda and torch.is_grad_enabled() and index.numel()):
        return hidden.index_select(0, index)
    from quadriga.models.kernels.gather import gather_rows, readers_of

    return gather_rows(hidden, index, readers_of(index, hidden.shape[0]))


class ScalarModel(TokenModel):
    """trunk → scalar head.

    Args:
        trunk: the base model of a Hugging Face causal LM or classifier.
        head: Linear(hidden, 1).
    """

    def __init__(self, trunk: Any, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    @property
    def huggingface(self) -> Any:
        return self.trunk

    @property
    def trunk_module(self) -> nn.Module:
        return self.trunk

    def forward(self, packed: PackedRows, at_last_token: bool = False) -> dict[str, Tensor]:
        """`values`, float32: `[N]`, each from the state before its response token was chosen (a value function knows
        the prefix, not the action); or, `at_last_token`, `[sequences]`, from the whole sequence (a score)."""
        hidden = self.last_hidden_state(packed)
        chosen = select_rows(hidden, packed.last_tokens if at_last_token else packed.predictors)
        bias = None if self.head.bias is None else self.head.bias.float()
        if chosen.is_cuda and is_exact():
            from quadriga.models.kernels.linear import linear

            values = linear(chosen.float(), self.head.weight.float(), bias)
        else:
            values = F.linear(chosen.float(), self.head.weight.float(), bias)
        return {"values": values.squeeze(-1)}


def new_scalar_head(hidden_size: int) -> nn.Linear:
    """A head that says 0 everywhere.

    The first advantages are then those of a policy without a baseline, instead of noise, and the head's own gradient
    does not vanish at 0: it is the trunk's that does, for one step.
    """
    head = nn.Linear(hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    return head


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
        statistics = token_log_probs(
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
        return {name: values for name, values in statistics._asdict().items() if values is not None}


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
