"""Laying out the rows of a step: which groups are worth training on, and who gets which rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quadriga.errors import DataError
from quadriga.protocol import DataProto


def groups_that_differ(batch: DataProto, metric: str, n: int) -> np.ndarray:
    """For each prompt, whether its `n` samples do not all have the same `metric`: `score`, or what the reward tells."""
    if metric == "score":
        values = batch.batch["score"].numpy()
    else:
        column = f"reward_{metric}"
        if column not in batch.non_tensor_batch:
            told = [k for k in batch.non_tensor_batch if k.startswith("reward_") and k != "reward_model"]
            raise DataError(
                f"algorithm.filter_groups.metric={metric}: the reward does not tell it",
                f"it tells {', '.join(k.removeprefix('reward_') for k in told)}",
            )
        values = batch.non_tensor_batch[column].astype(float)
    grouped = values.reshape(-1, n)
    return (grouped != grouped[:, :1]).any(1)


def layout(lengths: Sequence[int], mini_batches: int, world_size: int, balance: bool) -> np.ndarray:
    """An order of the rows in which equal contiguous chunks go to the ranks.

    Mini-batch k is made of the k-th of `mini_batches` equal parts of the batch, and of the k-th part of every rank's chunk:
    whatever rank a row goes to, it stays in its mini-batch. With `balance`, each mini-batch's rows are dealt to the ranks
    from the longest to the shortest, back and forth, so that the ranks' token counts are nearly equal.
    """
    rows = np.arange(len(lengths)).reshape(mini_batches, -1)
    shares: list[list[np.ndarray]] = [[] for _ in range(world_size)]
    for members in rows:
        if balance and world_size > 1:
            by_length = members[np.argsort(-np.asarray(lengths)[members], kind="stable")]
            dealt = by_length.reshape(-1, world_size).copy()
            dealt[1::2] = dealt[1::2, ::-1]
            parts = [np.sort(dealt[:, rank]) for rank in range(world_size)]
        else:
            parts = np.split(members, world_size)
        for rank, part in enumerate(parts):
            shares[rank].append(part)
    return np.concatenate([part for share in shares for part in share])
