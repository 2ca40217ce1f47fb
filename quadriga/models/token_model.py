"""What the training engine needs of a model: one forward pass over packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
