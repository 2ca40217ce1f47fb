"""The one source of row order: a permutation that is the same on every machine and in every library version."""

from __future__ import annotations

import numpy as np

from quadriga.errors import DataError

_WORD = 2**64
# Epochs count up from 0, so the streams for other purposes count down from the top and never meet them.
SUBSAMPLE_STREAM = _WORD - 1
HOLD_OUT_STREAM = _WORD - 2


def raw_stream(seed: int, stream: int) -> np.random.Philox:
    """Philox4x64-10 with key words (seed, stream) mod 2^64 and counter 0.

    Only its raw 64-bit output is ever used: NumPy guarantees that stream for ever, while it may change the
    algorithms behind `Generator.permutation` or `Generator.integers`.
    """
    return np.random.Philox(key=np.array([seed % _WORD, stream % _WORD], dtype=np.uint64))


def seeded_order(num_rows: int, seed: int, stream: int) -> np.ndarray:
    """The permutation [num_rows] int64 that belongs to (seed, stream).

    Row i draws the i-th raw word of the stream; rows are sorted by their word, equal words by row number.
    """
    return np.argsort(raw_stream(seed, stream).random_raw(num_rows), kind="stable")


def select_samples(num_rows: int, max_samples: int, *, shuffle: bool, seed: int) -> np.ndarray:
    """Ascending numbers of the rows to keep: all for a negative `max_samples`, else the first n, or a drawn n."""
    if max_samples == 0:
        raise DataError(f"max_samples=0 leaves 0 of {num_rows} rows", "use -1 for all rows, or a positive number")
    if max_samples < 0 or max_samples >= num_rows:
        return np.arange(num_rows)
    if not shuffle:
        return np.arange(max_samples)
    return np.sort(seeded_order(num_rows, seed, SUBSAMPLE_STREAM)[:max_samples])
