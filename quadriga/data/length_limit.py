"""What to do with a sequence over its limit: the same four answers for prompts and for training examples."""

from __future__ import annotations

import numpy as np

from quadriga.errors import DataError

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
