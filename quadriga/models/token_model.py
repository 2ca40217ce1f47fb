"""What the training engine needs of a model: one forward pass over packed rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quadriga.models.packing import PackedRows


class TokenModel(nn.Module):
    """A Hugging Face model in a module of our own, so that sharding sees one forward pass from tokens to results.

    `forward(packed, **options)` returns float32 tensors by name, `[N]` for the N wanted response tokens.
    """

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
