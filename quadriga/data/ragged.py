"""Many token sequences of different lengths in one flat array."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np


class RaggedTokens:
    """`flat` [total tokens] with row i at `flat[offsets[i]:offsets[i + 1]]`: four bytes a token and eight a row."""

    def __init__(self, flat: np.ndarray, offsets: np.ndarray) -> None:
        self.flat = flat
        self.offsets = offsets

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | np.ndarray], dtype: type = np.int32) -> RaggedTokens:
        arrays: list[np.ndarray] = [np.asarray(row, dtype=dtype) for row in rows]
        flat = np.concatenate(arrays) if arrays else np.empty(0, dtype)
        return cls(flat, _offsets([len(array) for array in arrays]))

    @classmethod
    def concat(cls, parts: Sequence[RaggedTokens]) -> RaggedTokens:
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(np.concatenate([part.flat for part in parts]), _offsets(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> np.ndarray:
        return self.flat[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def digest(self) -> str:
        """The same for the same sequences in the same order, and for no others."""
        sha = hashlib.sha256(np.ascontiguousarray(self.flat).view(np.uint8).data)
        sha.update(np.ascontiguousarray(self.offsets).view(np.uint8).data)
        return sha.hexdigest()

    def select(self, rows: np.ndarray) -> RaggedTokens:
        return RaggedTokens.from_rows((self[row] for row in rows), self.flat.dtype.type)


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
