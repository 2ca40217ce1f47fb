"""Laying out the rows of a step: repeated for their samples, sifted, and dealt to ranks without touching mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from quadriga.controller.remote_batch import RemoteBatch
from quadriga.errors import DataError
from quadriga.protocol import DataProto

Batch = TypeVar("Batch", DataProto, RemoteBatch)


def repeat_for_samples(prompts: Batch, n: int) -> Batch:
    """Every prompt `n` times, one after the other, with the number of the sample in column `sample_index`."""
    rows = prompts.repeat(n, interleave=True)
    rows.non_tensor_batch["sample_index"] = np.tile(np.arange(n), len(prompts))
    return rows


def groups_that_differ(batch: Batch, metric: str, n: int) -> Batch:
    """The rows of the prompts whose `n` samples do not all have the same `metric`: `score`, or what the reward tells."""
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
    return batch[np.repeat((grouped != grouped[:, :1]).any(1), n)]


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
