"""What one pass over the module computes on CUDA, and the attention that the module calls with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quadriga.errors import WorkerError
from quadriga.models.attention import takes_kernels
from quadriga.models.kernels.attention import Segments, segment_attention
from quadriga.rollout.native.attention import prefill_attention
from quadriga.rollout.native.cuda.attention_kernels import decode_attention, write_cache
from quadriga.rollout.native.geometry import UNSUPPORTED_FIX
from quadriga.rollout.native.kv_cache import CudaKVCache
from quadriga.rollout.native.plan import Chunk
from quadriga.rollout.native.slots import DeviceSlots

CUDA_ATTENTION = "quadriga_paged_cuda"
"""Name of this attention in transformers."""


@dataclass(eq=False)
class DecodePass:
    """One new token for each of `slots[B]` (−1: padding)."""

    cache: CudaKVCache
    table: DeviceSlots
    slots: Tensor
    places: Tensor
    """`[B]` where the new keys go, see `write_cache`"""
    splits: int
    windows: set[int | None] = field(default_factory=set)
    """Sliding windows that the module asked for"""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        self.windows.add(window)
        write_cache(self.cache, layer, k, v, self.places)
        table = self.table
        return decode_attention(
            self.cache, layer, q, self.slots, table.blocks, table.length, scaling, window, softcap, self.splits
        )


@dataclass(eq=False)
class PrefillPass:
    """Pieces of prompts, end to end."""

    cache: CudaKVCache
    chunks: list[Chunk]
    places: Tensor
    segments: Segments
    """Of the chunks, and of the tokens that each can see"""

    @classmethod
    def of(cls, cache: CudaKVCache, chunks: list[Chunk], places: Tensor) -> PrefillPass:
        lengths, contexts = [c.length for c in chunks], [c.start + c.length for c in chunks]
        return cls(cache, chunks, places, Segments.of(lengths, contexts, places.device))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        write_cache(self.cache, layer, k, v, self.places)
        if not takes_kernels(q):
            lengths = [chunk.length for chunk in self.chunks]
            parts = zip(self.chunks, q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
            return torch.cat(
                [
                    prefill_attention(self.cache, layer, chunk, queries, keys, values, scaling, window, softcap)
                    for chunk, queries, keys, values in parts
                ]
            )
        if any(chunk.start for chunk in self.chunks):
            k, v = self._contexts(layer)
        return segment_attention(q, k, v, self.segments, scaling, window, softcap)

    def _contexts(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all that each chunk can see, `[S, kv_heads, D]` each, out of the cache."""
        pairs = [self.cache.read(layer, c.blocks, c.start + c.length) for c in self.chunks]
        keys, values = (torch.cat(side, dim=1).transpose(0, 1) for side in zip(*pairs, strict=True))
        return keys, values


def register_cuda_attention() -> str:
    """Make `CUDA_ATTENTION` known to transformers; returns the name."""
    from transformers import AttentionInterface

    AttentionInterface.register(CUDA_ATTENTION, cuda_attention)
    return CUDA_ATTENTION


def cuda_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: DecodePass | PrefillPass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Like `attention.paged_attention`, with a pass of this module as the plan."""
    if plan is None or attention_mask is not None or kwargs.get("s_aux") is not None:
        raise WorkerError(
            f"{type(module).__name__} called {CUDA_ATTENTION} without a plan, or with a mask or attention sinks",
            UNSUPPORTED_FIX,
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    scaling = q.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(layer, q, k, v, scaling, sliding_window, softcap).unsqueeze(0), None
