"""Rows to a DataProto: padded to the longest row of the batch, never to a configured maximum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quadriga.protocol import DataProto

_TENSOR_FIELDS = ("input_ids", "loss_mask")


def collate_prompts(items: Sequence[dict[str, Any]], *, pad_token_id: int) -> DataProto:
    """Prompts, padded on the left so that every answer begins at the same column.

    Tensors [batch, longest] int64: input_ids, attention_mask, position_ids. All other fields: arrays over rows.
    """
    return _collate(items, pad_token_id, pad_left=True)


def collate_sft(items: Sequence[dict[str, Any]], *, pad_token_id: int) -> DataProto:
    """Whole training examples, padded on the right; `loss_mask[b, t]` is 1 where token t itself is a target."""
    return _collate(items, pad_token_id, pad_left=False)


def collate_pairs(items: Sequence[dict[str, Any]], *, pad_token_id: int) -> DataProto:
    """Preference pairs as rows like those of `collate_sft`: row 2i is the chosen side of pair i, row 2i + 1 the rejected."""
    sides = [{**item[side], "uid": item["uid"]} for item in items for side in ("chosen", "rejected")]
    return collate_sft(sides, pad_token_id=pad_token_id)


def _collate(items: Sequence[dict[str, Any]], pad_token_id: int, *, pad_left: bool) -> DataProto:
    lengths = np.array([len(item["input_ids"]) for item in items])
    column = np.arange(lengths.max())
    real = column >= (column.size - lengths)[:, None] if pad_left else column < lengths[:, None]
    tensors = {
        "attention_mask": torch.from_numpy(real.astype(np.int64)),
        "position_ids": torch.from_numpy(np.maximum(np.cumsum(real, axis=1) - 1, 0)),
    }
    for name, fill in (("input_ids", pad_token_id), ("loss_mask", 0)):
        if name in items[0]:
            padded = np.full(real.shape, fill, dtype=np.int64)
            padded[real] = np.concatenate([item[name] for item in items])
            tensors[name] = torch.from_numpy(padded)
    fields = dict.fromkeys(name for item in items for name in item if name not in _TENSOR_FIELDS)
    non_tensors = {name: _field([item.get(name) for item in items]) for name in fields}
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def _field(values: list[Any]) -> np.ndarray:
    if all(type(value) is int for value in values):
        return np.array(values, dtype=np.int64)
    # Filled one by one: NumPy would turn equally long lists into a second dimension.
    field = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        field[row] = value
    return field
