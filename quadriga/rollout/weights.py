"""New weights for an engine, and a number that says which ones it holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import WorkerError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def checksums(weights: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """For each weight a 64-bit number that changes when it, its name or its dtype does.

    It is a sum over elements (their bits, times a factor made of the name), so those of the parts of a weight add up, and
    zeros change nothing.
    """
    factors, sums = {}, []
    for name, weight in weights:
        bits = weight.detach().contiguous().view(_BITS[weight.element_size()])
        factors[name] = zlib.crc32(f"{name}:{weight.dtype}".encode()) | 1
        sums.append(bits.sum(dtype=torch.int64))
    totals = torch.stack(sums).tolist() if sums else []  # one wait for the device, not one a weight
    return {name: factor * total % (1 << 64) for (name, factor), total in zip(factors.items(), totals, strict=True)}


def checksum(weights: Iterable[tuple[str, Tensor]]) -> int:
    """One such number for all of them."""
    return sum(checksums(weights).values()) % (1 << 64)


@torch.no_grad()
def copy_weights(module: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into the module's parameters of the same names, cast to their dtypes.

    WorkerError for a name the module does not have, another shape, or a parameter that was not given.
    """
    own = dict(module.named_parameters())
    missing = set(own)
    for name, weight in weights:
        if name not in own:
            raise WorkerError(f"the rollout module has no weight {name!r}", "send the weights of the same model")
        if own[name].shape != weight.shape:
            raise WorkerError(
                f"weight {name!r} has shape {tuple(weight.shape)}, the rollout module wants {tuple(own[name].shape)}",
                "send the weights of the same model, whole (not sharded)",
            )
        own[name].copy_(weight)
        missing.discard(name)
    if missing:
        raise WorkerError(
            f"{len(missing)} weights were not sent, the first is {min(missing)!r}", "send all weights of the model"
        )
