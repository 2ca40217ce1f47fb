"""Token sequences of different lengths: many in one flat array, and what to do with one that is over its limit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quadriga.errors import DataError


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


TRUNCATIONS = ("error", "left", "right", "middle")


def check_truncation(mode: str) -> None:
    if mode not in TRUNCATIONS:
        raise DataError(f"data.truncation={mode!r} is unknown", f"use one of {', '.join(TRUNCATIONS)}")


def kept_tokens(length: int, max_length: int, mode: str) -> np.ndarray:
    """Positions that stay of a sequence of `length` tokens; at most `max_length`, ascending.

    `left` and `right` name the side that is cut; `middle` keeps the first half and the last half (the larger one).
    """
    positions = np.arange(length)
    if length <= max_length:
        return positions
    if mode == "left":
        return positions[length - max_length :]
    if mode == "right":
        return positions[:max_length]
    head = max_length // 2
    return np.concatenate([positions[:head], positions[length - (max_length - head) :]])
