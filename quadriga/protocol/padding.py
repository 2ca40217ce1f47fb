"""Making the number of rows divisible, and folding rows into groups."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np

from quadriga.protocol.columns import require

if TYPE_CHECKING:
    from quadriga.protocol.data_proto import DataProto


class _AutoPadding(type):
    """Gives `DataProtoConfig` a class-level property: on by assignment, or by QUADRIGA_AUTO_PADDING=1."""

    _assigned = False

    @property
    def auto_padding(cls) -> bool:
        return cls._assigned or os.environ.get("QUADRIGA_AUTO_PADDING", "").lower() in ("1", "true")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._assigned = bool(enabled)


class DataProtoConfig(metaclass=_AutoPadding):
    """`DataProtoConfig.auto_padding = True` lets every DataProto be split into parts that are not quite equal.

    One DataProto alone is switched on by `meta_info[DataProtoConfig.auto_padding_key] = True`, which
    `from_dict(auto_padding=True)` sets.
    """

    auto_padding_key = "_quadriga_auto_padding"


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, repeated from the first on, until `size_divisor` divides their number: (padded, rows added)."""
    require(size_divisor > 0, f"size_divisor must be positive, got {size_divisor}")
    rows = len(data)
    pad_size = -rows % size_divisor
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.arange(rows + pad_size) % rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows: the inverse of `pad_dataproto_to_divisor`."""
    require(0 <= pad_size <= len(data), f"cannot remove {pad_size} padding rows from {len(data)} rows")
    return data[: len(data) - pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """`[rows, ...]` -> `[new_batch_size, rows // new_batch_size, ...]` in every column."""
    rows = len(data)
    require(
        new_batch_size > 0 and rows % new_batch_size == 0,
        f"{rows} rows cannot be folded into {new_batch_size} groups of equal size",
    )
    group = rows // new_batch_size
    batch = data.fetch().batch
    if batch is not None:
        batch = batch.reshape(new_batch_size, group)
        batch.batch_size = [new_batch_size]
    columns = {key: column.reshape(new_batch_size, group, *column.shape[1:]) for key, column in _arrays(data)}
    return type(data)(batch=batch, non_tensor_batch=columns, meta_info=data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Merge the first `batch_dims` dimensions of every column into the rows: the inverse of `fold_batch_dim`."""
    batch = data.fetch().batch
    if batch is not None:
        batch = batch.copy()
        batch.auto_batch_size_(batch_dims=batch_dims)
        batch = batch.reshape(batch.batch_size.numel())
    columns = {}
    for key, column in _arrays(data):
        require(column.ndim >= batch_dims, f"non_tensor_batch['{key}'] has no {batch_dims} dimensions to merge")
        columns[key] = column.reshape(math.prod(column.shape[:batch_dims]), *column.shape[batch_dims:])
    return type(data)(batch=batch, non_tensor_batch=columns, meta_info=data.meta_info)


def _arrays(data: DataProto) -> list[tuple[str, np.ndarray]]:
    return list(data.non_tensor_batch.items())
