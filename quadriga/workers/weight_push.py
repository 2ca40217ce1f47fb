"""Weights on their way from the actor to rollout engines in other processes, through the object store.

Rank 0 of the actor puts them there once, in buckets; every rollout rank reads the same buckets, one tensor at a time. So a push
costs one copy of the weights in host memory of each node that takes part, and nothing beside it but a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quadriga.controller import object_store
from quadriga.errors import WorkerError
from quadriga.protocol import deserialize_single_tensor, serialize_single_tensor
from quadriga.rollout.interface import WeightsEcho
from quadriga.rollout.weights import checksum

BUCKET_BYTES = 256 << 20
FETCH_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PushedWeights:
    """Where the weights are, and what an engine must answer that has taken them."""

    echo: WeightsEcho
    buckets: list[Any]


def push(version: int, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES) -> PushedWeights:
    """Put `weights` into the object store."""
    total, size = 0, 0
    buckets: list[Any] = []
    bucket: dict[str, Any] = {}
    for name, weight in weights:
        total += checksum([(name, weight)])
        # An engine may take these weights when training has gone on: what is put must not be the trained ones themselves.
        bucket[name] = serialize_single_tensor(weight if object_store.copies() else weight.clone())
        size += weight.nbytes
        if size >= bucket_bytes:
            buckets.append(object_store.put(bucket))
            bucket, size = {}, 0
    if bucket:
        buckets.append(object_store.put(bucket))
    return PushedWeights(WeightsEcho(version, total % (1 << 64)), buckets)


def require_held(echoes: Sequence[WeightsEcho], version: int) -> None:
    """WorkerError unless all that were to take the weights, and who pushed them, say the same: this version, these numbers."""
    if {e.version for e in echoes} != {version} or len({e.checksum for e in echoes}) != 1:
        raise WorkerError(
            f"step {version}: the rollout engines do not hold version {version} of the weights: {echoes}",
            "this is a fault of the weight hand-over, not of your configuration: please report it",
        )


def pulled(pushed: PushedWeights) -> Iterator[tuple[str, Tensor]]:
    """The weights that were pushed, one by one."""
    for handle in pushed.buckets:
        (bucket,) = object_store.get([handle], FETCH_TIMEOUT_S)
        for name, raw in bucket.items():
            yield name, deserialize_single_tensor(raw)
