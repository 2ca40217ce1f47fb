"""RemoteBatch: a batch whose wide columns stay in the object store. Who has it holds handles; who needs rows fetches those.

A tensor column with one number a row (a length, a score) is small and travels in the batch itself, and so do the columns
that are no tensors (uids, data sources). Every other column is wide: it lies in the store in pieces of a few rows each.

A worker group takes a RemoteBatch wherever it takes a DataProto: each rank fetches the rows that are its own, and leaves
the wide columns of its answer in the store again. The process in between never sees them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quadriga.controller import object_store
from quadriga.protocol import DataProto
from quadriga.protocol.columns import require, require_present
from quadriga.protocol.values import raw_tensor, tensor_from_raw

PIECE_BYTES = 1 << 20
"""A piece holds at least so much, if there are rows enough: a row that is larger travels alone."""
MAX_PIECES = 256
"""Pieces that one process makes of one answer at most."""
PART_BYTES = 4 << 20
"""What `in_parts` fetches at a time."""
FETCH_TIMEOUT_S = 600.0
_AT_A_TIME = 32


@dataclass(frozen=True)
class Source:
    """Some wide columns: their pieces, and where in them each row of the batch lies."""

    columns: dict[str, tuple[str, tuple[int, ...]]]
    """Name → dtype, and shape of a row."""
    pieces: list[Any]
    piece: np.ndarray
    row: np.ndarray

    def take(self, index: Any) -> Source:
        """Other rows; pieces without any of them are left out."""
        needed, piece = np.unique(self.piece[index], return_inverse=True)
        return Source(self.columns, [self.pieces[k] for k in needed], piece, self.row[index])

    def fetch(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """These columns of all rows, in memory of this process."""
        out = {n: np.empty((len(self.row), _row_bytes(*self.columns[n])), dtype=np.uint8) for n in names}
        for start in range(0, len(self.pieces), _AT_A_TIME):
            got = object_store.get(self.pieces[start : start + _AT_A_TIME], FETCH_TIMEOUT_S)
            for number, piece in enumerate(got, start):
                here = np.flatnonzero(self.piece == number)
                for name in names:
                    out[name][here] = piece[name][self.row[here]]
        return {
            n: tensor_from_raw(raw.reshape(-1), self.columns[n][0], _shape(raw, self.columns[n]))
            for n, raw in out.items()
        }


@dataclass
class RemoteBatch:
    """A batch by its handles; the methods that it has mean what they mean for a DataProto.

    Args:
        batch: the small tensor columns, `[rows]` each.
        sources: the wide ones.
        non_tensor_batch, meta_info: as in a DataProto.
        length: number of rows.
    """

    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    length: int = 0

    @classmethod
    def put(cls, data: DataProto) -> RemoteBatch:
        """Leave the wide columns of `data` in the object store."""
        columns = {} if data.batch is None else {name: data.batch[name] for name in data.batch.keys()}  # noqa: SIM118
        small = {name: column for name, column in columns.items() if column.ndim == 1}
        wide = {name: column for name, column in columns.items() if column.ndim > 1}
        sources = [_stored(wide, len(data))] if wide else []
        return cls(small, sources, dict(data.non_tensor_batch), data.meta_info, len(data))

    def fetch(self) -> DataProto:
        """All of it, in memory of this process."""
        tensors = dict(self.batch)
        for source in self.sources:
            tensors |= source.fetch(list(source.columns))
        return DataProto.from_dict(tensors, dict(self.non_tensor_batch), self.meta_info)

    def __len__(self) -> int:
        return self.length

    @property
    def widths(self) -> dict[str, tuple[int, ...]]:
        """The wide columns, with the shape of a row."""
        return {name: shape for source in self.sources for name, (_, shape) in source.columns.items()}

    @property
    def row_bytes(self) -> int:
        """Of the wide columns."""
        return sum(_row_bytes(*column) for source in self.sources for column in source.columns.values())

    def __getitem__(self, index: Any) -> RemoteBatch:
        """A slice, or a list or array of indices or booleans."""
        index = np.arange(self.length)[index if isinstance(index, slice) else np.asarray(index)]
        rows = torch.from_numpy(index)
        return RemoteBatch(
            {name: column[rows] for name, column in self.batch.items()},
            [source.take(index) for source in self.sources],
            {name: column[index] for name, column in self.non_tensor_batch.items()},
            self.meta_info,
            len(index),
        )

    def repeat(self, repeat_times: int, interleave: bool = True) -> RemoteBatch:
        rows = np.arange(self.length)
        return self[np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)]

    def reorder(self, indices: torch.Tensor) -> None:
        self.__dict__.update(self[indices.numpy()].__dict__)

    def chunk(self, chunks: int) -> list[RemoteBatch]:
        require(self.length % chunks == 0, f"{self.length} rows cannot be cut into {chunks} equal parts")
        size = self.length // chunks
        return [self[k * size : (k + 1) * size] for k in range(chunks)]

    def select(
        self, batch_keys: Sequence[str] | None = None, non_tensor_batch_keys: Sequence[str] | None = None
    ) -> RemoteBatch:
        """These columns only; None keeps all."""
        names = column_names(self) if batch_keys is None else list(batch_keys)
        kept = list(self.non_tensor_batch) if non_tensor_batch_keys is None else list(non_tensor_batch_keys)
        require_present(names, column_names(self), "batch")
        require_present(kept, self.non_tensor_batch, "non_tensor_batch")
        sources = []
        for source in self.sources:
            columns = {name: column for name, column in source.columns.items() if name in names}
            if columns:
                sources.append(Source(columns, source.pieces, source.piece, source.row))
        small = {name: column for name, column in self.batch.items() if name in names}
        columns_kept = {name: self.non_tensor_batch[name] for name in kept}
        return RemoteBatch(small, sources, columns_kept, self.meta_info, self.length)

    def union(self, other: RemoteBatch) -> RemoteBatch:
        """Add the columns of `other`, in place; they replace those of the same name."""
        require(len(other) == self.length, f"{len(other)} rows cannot be added to {self.length}")
        new = set(column_names(other))
        rest = self.select([name for name in column_names(self) if name not in new], None)
        self.batch = rest.batch | other.batch
        self.sources = rest.sources + other.sources
        self.non_tensor_batch = self.non_tensor_batch | other.non_tensor_batch
        return self

    @staticmethod
    def concat(parts: Sequence[RemoteBatch]) -> RemoteBatch:
        """Stack batches that have the same columns in the same sources, as the answers of a group's ranks have."""
        first = parts[0]
        for part in parts:
            require(
                [s.columns for s in part.sources] == [s.columns for s in first.sources]
                and part.batch.keys() == first.batch.keys()
                and part.non_tensor_batch.keys() == first.non_tensor_batch.keys(),
                f"cannot stack different columns: {part.widths} and {first.widths}",
            )
        return RemoteBatch(
            {name: torch.cat([part.batch[name] for part in parts]) for name in first.batch},
            [_joined([part.sources[k] for part in parts]) for k in range(len(first.sources))],
            {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in first.non_tensor_batch},
            first.meta_info,
            sum(map(len, parts)),
        )


def column_names(batch: DataProto | RemoteBatch) -> list[str]:
    """The tensor columns, wherever they are."""
    if isinstance(batch, RemoteBatch):
        return [*batch.batch, *batch.widths]
    return [] if batch.batch is None else list(batch.batch.keys())


def add_columns(batch: DataProto | RemoteBatch, columns: dict[str, torch.Tensor]) -> None:
    """Add tensor columns that are in this process, in place of those of the same name."""
    if isinstance(batch, RemoteBatch):
        batch.union(RemoteBatch.put(DataProto.from_dict(columns)))
    else:
        for name, column in columns.items():
            batch.batch[name] = column


def in_parts(
    batch: DataProto | RemoteBatch, columns: Sequence[str], part_bytes: int = PART_BYTES
) -> Iterator[DataProto]:
    """The rows with these tensor columns, in this process: a few at a time from the store, all at once if they are here."""
    chosen = batch.select(columns, None)
    if isinstance(chosen, DataProto):
        yield chosen
        return
    rows = max(1, part_bytes // max(1, chosen.row_bytes))
    for start in range(0, len(chosen), rows):
        yield chosen[start : start + rows].fetch()


def _stored(wide: dict[str, torch.Tensor], length: int) -> Source:
    columns = {}
    for name, column in wide.items():
        require(not column.is_nested, f"batch['{name}'] is ragged and cannot be left in the object store row by row")
        columns[name] = (str(column.dtype).removeprefix("torch."), tuple(column.shape[1:]))
    raw = {name: raw_tensor(column).reshape(length, _row_bytes(*columns[name])) for name, column in wide.items()}
    row_bytes = sum(array.shape[1] for array in raw.values())
    size = max(1, -(-PIECE_BYTES // max(1, row_bytes)), -(-length // MAX_PIECES))
    starts = range(0, length, size)
    pieces = [object_store.put({name: array[start : start + size] for name, array in raw.items()}) for start in starts]
    rows = np.arange(length)
    return Source(columns, pieces, rows // size, rows % size)


def _joined(sources: list[Source]) -> Source:
    offsets = np.cumsum([0, *(len(source.pieces) for source in sources)])
    return Source(
        sources[0].columns,
        [piece for source in sources for piece in source.pieces],
        np.concatenate([source.piece + offset for source, offset in zip(sources, offsets)]),
        np.concatenate([source.row for source in sources]),
    )


def _row_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * getattr(torch, dtype).itemsize


def _shape(raw: np.ndarray, column: tuple[str, tuple[int, ...]]) -> tuple[int, ...]:
    return (len(raw), *column[1])
