"""A column of a DataProto that lives elsewhere: in a store that other processes reach too. The table holds handles to it.

The rows lie in the store in pieces of a few rows each, and who needs some of them fetches the pieces that hold those. Choosing,
repeating and ordering rows changes numbers beside the handles and moves no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from quadriga.protocol.columns import require
from quadriga.protocol.values import raw_tensor, tensor_from_raw

PIECE_BYTES = 1 << 20
"""A piece holds at least so much, if there are rows enough: a row that is larger travels alone."""
MAX_PIECES = 256
"""Pieces that one process makes of one column at most."""
PIECES_AT_A_TIME = 32
FETCH_TIMEOUT_S = 600.0


class Store(NamedTuple):
    """Where columns can live. Both functions travel with the handles by name, so they are functions of a module."""

    put: Callable[[Any], Any]
    """`put(value)` gives a handle, which other processes can be sent; the value is dropped with the last handle to it."""
    get: Callable[[Sequence[Any], float | None], list[Any]]
    """`get(handles, timeout_s)` gives the values. Arrays among them may be read-only views of memory that others share."""


@dataclass(frozen=True)
class StoredColumn:
    """Row i of the column is row `row[i]` of `pieces[piece[i]]`, each piece a uint8 array `[rows of the piece, row_bytes]`."""

    store: Store
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    pieces: list[Any]
    piece: np.ndarray
    row: np.ndarray

    @classmethod
    def put(cls, store: Store, key: str, column: torch.Tensor) -> StoredColumn:
        """Leave a dense tensor in `store`; `key` is for the message."""
        require(_is_dense(column), f"batch['{key}'] is not a dense tensor and cannot be left in a store row by row")
        rows, row_bytes = len(column), column.shape[1:].numel() * column.dtype.itemsize
        raw = raw_tensor(column).reshape(rows, row_bytes)
        size = max(1, -(-PIECE_BYTES // max(1, row_bytes)), -(-rows // MAX_PIECES))
        pieces = [store.put(raw[start : start + size]) for start in range(0, rows, size)]
        index = np.arange(rows)
        return cls(store, column.dtype, tuple(column.shape[1:]), pieces, index // size, index % size)

    def __len__(self) -> int:
        return len(self.row)

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.row_shape).numel() * self.dtype.itemsize

    def take(self, rows: slice | np.ndarray) -> StoredColumn:
        """Other rows; pieces without any of them are left out."""
        needed, piece = np.unique(self.piece[rows], return_inverse=True)
        return replace(self, pieces=[self.pieces[k] for k in needed], piece=piece, row=self.row[rows])

    def fetch(self) -> torch.Tensor:
        """The column `[rows, *row_shape]`, in memory of this process."""
        out = np.empty((len(self), self.row_bytes), dtype=np.uint8)
        for start in range(0, len(self.pieces), PIECES_AT_A_TIME):
            handles = self.pieces[start : start + PIECES_AT_A_TIME]
            for number, piece in enumerate(self.store.get(handles, FETCH_TIMEOUT_S), start):
                here = np.flatnonzero(self.piece == number)
                out[here] = piece[self.row[here]]
        return tensor_from_raw(out.reshape(-1), str(self.dtype).removeprefix("torch."), (len(self), *self.row_shape))

    def is_same(self, other: object) -> bool:
        """Whether `other` is stored too, and is the same rows of the same pieces: then the two are equal unseen."""
        return (
            isinstance(other, StoredColumn)
            and (self.dtype, self.row_shape) == (other.dtype, other.row_shape)
            and len(self.pieces) == len(other.pieces)
            and all(mine is theirs for mine, theirs in zip(self.pieces, other.pieces))
            and np.array_equal(self.piece, other.piece)
            and np.array_equal(self.row, other.row)
        )

    @staticmethod
    def concat(key: str, parts: Sequence[StoredColumn]) -> StoredColumn:
        """Stack the rows of columns of one type; `key` is for the message."""
        types = {(str(part.dtype), part.row_shape) for part in parts}
        require(
            len(types) == 1,
            f"batch['{key}'] cannot be concatenated: the parts have rows of {sorted(types)}. Pad them to one length first",
        )
        offsets = np.cumsum([0, *(len(part.pieces) for part in parts)])
        return replace(
            parts[0],
            pieces=[piece for part in parts for piece in part.pieces],
            piece=np.concatenate([part.piece + offset for part, offset in zip(parts, offsets)]),
            row=np.concatenate([part.row for part in parts]),
        )

    def __str__(self) -> str:
        return f"elsewhere {(len(self), *self.row_shape)} {self.dtype}"


def is_wide(column: Any) -> bool:
    """Whether a column is worth leaving elsewhere: dense, with more than one number a row."""
    return _is_dense(column) and column.ndim > 1


def _is_dense(column: Any) -> bool:
    return isinstance(column, torch.Tensor) and not column.is_nested and column.layout == torch.strided
