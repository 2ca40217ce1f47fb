"""Token sequences of different lengths: many in one flat array, which tokens stay of one over its limit, and how to deal them out."""

from __future__ import annotations

import hashlib
import heapq
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


def balance_over_ranks(lengths: Sequence[int], num_ranks: int, mini_batch_rows: int | None = None) -> list[int]:
    """An order of the rows in which equal consecutive shares, one a rank, have about equal numbers of tokens.

    Rank r gets rows `[r·n/ranks, (r+1)·n/ranks)` of the result and cuts them into consecutive mini-batches. Mini-batch k
    (rows `[k·m, (k+1)·m)` of the input) stays mini-batch k: it is dealt out over the ranks, longest rows first, each to
    the rank with the fewest tokens so far that has room.
    """
    rows = len(lengths)
    size = rows if mini_batch_rows is None else mini_batch_rows
    if size < 1 or rows % size or size % num_ranks:
        raise DataError(
            f"{rows} rows in mini-batches of {size} cannot be dealt out evenly to {num_ranks} ranks",
            f"make the rows a multiple of the mini-batch, and the mini-batch a multiple of {num_ranks}",
        )
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for start in range(0, rows, size):
        for share, dealt in zip(shares, _deal(range(start, start + size), lengths, num_ranks), strict=True):
            share.extend(dealt)
    return [row for share in shares for row in share]


def _deal(rows: range, lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0, rank) for rank in range(num_ranks)]
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        tokens, rank = heapq.heappop(heap)
        hands[rank].append(row)
        if len(hands[rank]) < len(rows) // num_ranks:
            heapq.heappush(heap, (tokens + lengths[row], rank))
    return [sorted(hand) for hand in hands]
