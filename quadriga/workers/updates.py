"""How a worker goes over its rows: passes, mini-batches, and the limits of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from quadriga.config.needs import uses_token_budget
from quadriga.protocol import DataProto

NO_LIMIT = 1 << 40


def micro_batch_limits(section: Any, rows_key: str, tokens_key: str) -> dict[str, Any]:
    """`max_tokens` and `max_rows` of a micro-batch: a token budget, or a fixed number of rows."""
    if uses_token_budget(section):
        return {"max_tokens": getattr(section, tokens_key), "max_rows": None}
    return {"max_tokens": NO_LIMIT, "max_rows": getattr(section, rows_key)}


def mini_batches(data: DataProto, count: int, epochs: int, shuffle: bool, seed: int) -> Iterator[DataProto]:
    """This rank's share of each mini-batch, `count` of them a pass, in `epochs` passes.

    The driver has laid the rows out so that the k-th of `count` equal parts of every rank together are mini-batch k. With
    `shuffle` the parts are drawn anew in each pass, the same way on every rank.
    """
    size = len(data) // count
    for epoch in range(epochs):
        order = torch.arange(len(data))
        if shuffle:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for k in range(count):
            yield data[order[k * size : (k + 1) * size]]


def mean_of(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Each metric's mean over the mini-batches that have it."""
    names = dict.fromkeys(name for m in metrics for name in m)
    return {name: sum(m[name] for m in metrics if name in m) / sum(name in m for m in metrics) for name in names}
