"""How a worker goes over its rows: passes, mini-batches, and the limits of a micro-batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from quadriga.accelerator import device_module
from quadriga.config.memory import with_checkpointing
from quadriga.config.needs import uses_token_budget
from quadriga.config.schema import Config
from quadriga.host import usable_memory
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


def local_world_size() -> int:
    """Workers of this role on this node."""
    return int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))


def recomputes_activations(config: Config, role: str, device: str, slots_here: int) -> bool:
    """What `enable_gradient_checkpointing` comes to for `actor` or `critic`; `auto` asks for the memory of the smallest device of
    all ranks, so that all decide alike: a rank that recomputes alone would wait for the others in a layer's collectives.

    Args:
        slots_here: workers that share the memory of a CPU.
    """
    from quadriga.engine.sharding import smallest_over_ranks

    where = torch.device(device)
    if device == "cpu":
        own = usable_memory()[0] // max(1, slots_here)
    else:
        own = device_module(where).get_device_properties(where).total_memory
    capacity = int(smallest_over_ranks(torch.tensor(own, device=where)))
    decided = with_checkpointing(config, where.type, capacity)
    model = decided.actor_rollout_ref.model if role == "actor" else decided.critic.model
    return bool(model.enable_gradient_checkpointing)
